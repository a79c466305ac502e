// Package egress is the router of an egress gateway. Envoy asks it about every request that a sandbox sends through
// the gateway as its proxy, and it answers where the request goes, or why it is refused. Package envoy has the
// configuration of that Envoy, and package policy the rules.
//
// # Guarantees
//
//   - A request is admitted only for the one sandbox at the address of the connection's peer, and only with its
//     credential. No header names the client.
//   - A request is admitted under the rules that its sandbox has at that moment, which are read again after the name
//     was looked up. A name that they refuse is not looked up.
//   - Envoy connects to the address that was checked, and to no other one.
//   - Until the first [Server.Replace], and while Options.Fresh is false, every request is refused.
//   - [Server.Set], [Server.Forget] and [Server.Replace] take effect at once, in the order of the calls: no request is
//     admitted any more that they refuse. They wait for nothing.
//   - [Server.Barrier] says when every request has ended at Envoy that the calls before it took away.
//   - The open requests of one sandbox, their rate, and its look-ups at one time are bounded for that sandbox.
//   - The allocator is asked about a sandbox that is not known, once at a time, and the requests of the sandbox wait
//     for the answer for at most a second. The questions are bounded in number and in time.
//   - No request outlives the router that has admitted it.
//   - No line of the log has a path, a header or a credential.
//
// # States of a request
//
//	deciding  it counts as open; its name may be looked up        -> admitted, refused
//	admitted  it is in the table of its sandbox, and its answer is sent or about to be -> cut, ended
//	cut       its stream was ended with an error, by the router   -> ended
//	ended     Envoy has reset its stream, or is gone
//
// # How a request ends
//
// Envoy keeps the ext_proc stream of an admitted request until the answer of the origin has ended, or the tunnel has,
// because the processing mode asks for the trailers of the answer. Both connections are in HTTP/1.1 without trailers,
// so no message about them is ever sent. If the router ends the stream with an error before, Envoy resets the request,
// also in the middle of a tunnel that is idle or busy, and closes the connection to the origin. Then it resets the
// stream, and so that reset is the sign that nothing more passes. The client sees the end up to a second later. A
// stream that ends with status OK ends no request, so the router never ends one so.
//
// If the connection between router and Envoy ends, all requests on it end in the same way. A router that hangs answers
// no ping of HTTP/2, and Envoy closes the connection within envoy.EgressRouterLoss. All this was seen with Envoy 1.40,
// and the tests see it again.
//
// # What breaks the guarantees
//
//   - An Envoy that is configured otherwise than package envoy does it.
//   - A network in which a pod can send from the address of another one and has its credential.
//   - A clock behind Options.Fresh that stands still.
//
// # Limits
//
//   - A tunnel ends when one side closes its direction, or when it is silent for envoy.EgressIdle.
//   - The bytes of a tunnel are not read. An allowed host may be a relay to others.
//   - Idle connections of one sandbox without a request are bounded by Envoy's limit for all, and by 60 s. Look-ups
//     share maxLookups, too.
//   - While an Envoy stands still, no barrier is passed that waits for one of its requests, and none after it.
//   - Requests from addresses of no sandbox are not bounded in their rate. They are refused, and use up the questions
//     to the allocator.
package egress
