// Package admission holds what one router knows of each sandbox: its route, its use, and whether it is quiesced. No
// other package changes these, and every request is admitted here.
//
// # States of a sandbox
//
//	unknown    the router has no route of it, or Close has taken it. A request has the allocator asked (package
//	           routecache).
//	routable   Put, Resolve or Replace has given its route. Admit admits requests.
//	quiesced   Quiesce has been called. Admit admits nothing until Resume, Release or Replace.
//	gone       Release has been called. This is final.
//
// From before the first moment at which a route can be found until after the last one, the sandbox has a record of its
// use (package lastactive). The record outlives the route if the cache evicts the route, or if Close or an answer to a
// question takes it.
//
// # One admission
//
// A caller finds a route, checks the request against it, and passes it to Admit. What Routes and Uses return are views:
// only Admit makes a request pass. Admit takes these steps, in this order:
//
//  1. It takes what the request costs of the limits of its sandbox, and notes the use.
//  2. It counts the answer as one that Envoy has not read.
//  3. It checks that the route is still that of the sandbox, is fresh, and is not quiesced.
//  4. If that is not so, it takes back 2 and 1.
//
// A release, a close or a question that comes before step 3 is seen there. One that comes later finds what steps 1 and 2 have
// noted. The answer stays unread, and the sandbox in use, until Admission.Read.
//
// # Guarantees
//
//   - A release has taken effect when Barrier, called after Release, calls its function: Envoy has read every answer that
//     names the sandbox, and none follows.
//   - The same holds for Close, until the sandbox gets a route again.
//   - After Quiesce has returned, Admit admits nothing for the sandbox until Resume, Release or Replace, and Uses knows of
//     every request that was admitted before. A look that begins then finds the use or the unread answer.
//   - A route that can be found belongs to a sandbox with a record of its use.
//   - An Admit that admits nothing leaves no use and no unread answer, and costs nothing of a limit. If it counted as a
//     first request to a port of Envoy's list, it does so until the next look.
//   - A request that a limit refuses is no use at any moment, whenever a look comes.
//   - The eviction of a route ends no use, no unread answer, no quiesce and no tombstone.
//   - Memory is bounded. Package routecache bounds what it keeps. There is one record of use for each sandbox whose
//     route the leader has sent, until its release, or until a snapshot has no route of it and the sandbox is not in use.
//   - Admit does not allocate if Envoy lists the port.
//
// # Limits of each sandbox
//
// A limit takes what a request costs at the begin of step 1, and step 4 gives it back. If it were taken later, a look
// could find a request in use that the limit then refuses. The router tries a request again after each Admit that has
// admitted nothing: first at once, then in a goroutine, and there after each lookup. It costs once, because only the
// last one admits. What is left of a limit stands in the record of use (lastactive.Entry), and not beside the route:
// Expect makes it, Forget and Retain drop it. So an eviction does not refill it. A limit counts for one router: n
// gateways admit n times as much, and a restart refills it.
//
// # What breaks the guarantees
//
//   - Changes that do not come in the order of the allocator's stream, or come from two goroutines at one time.
//   - A Barrier for a message whose changes are not complete.
//   - An Admission that is read before Envoy has read the answer. One that is never read keeps its sandbox in use, and
//     every later release without acknowledgement.
//   - An answer that names a pod without an Admission.
//   - A route at another address for a sandbox that has one: its record of use begins anew.
//   - What breaks the guarantees of packages routecache and lastactive, apart from the order of their calls.
package admission
