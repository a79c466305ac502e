// Package extproc is the router. Envoy asks it about every request, and it answers where the
// request goes, or why it is refused.
//
// # Guarantees
//
//   - A request is admitted only by an answer that names a destination and a sandbox ID. No
//     failure leads to an answer with a destination.
//   - Only the host selects the sandbox. No header overrides a sandbox host name. A host
//     that parsing does not consume completely is refused.
//   - A request for a sandbox that is not public is admitted only with a credential of that sandbox or
//     with an API key of its team, by the keys that TeamKeys has at that moment.
//   - A destination lies in Options.PodCIDRs.
//   - Every request is admitted by package admission, which has the guarantees about releases, questions and use.
//   - The number of ports of one sandbox in use at one time is bounded, so that one client
//     cannot make Envoy's list of open requests long. See package lastactive.
//   - No request for a quiesced sandbox is admitted. The request waits for the verdict for up
//     to 2 s and is then refused. The router never resumes a sandbox by itself.
//   - A request for a sandbox that the router does not know waits until a leader can be asked, for up to
//     MaxWait, and is then refused.
//   - Nothing that outlives a call is a view into the memory of its message.
//   - The bytes of all requests that wait are bounded. Above the bound a request that would wait is refused, and one
//     that needs no wait is answered as ever.
//   - A failure of the server never ends a stream with gRPC status Unavailable, because Envoy
//     would ask again up to 30 times.
//
// # A stream
//
// One ext_proc stream carries one request-headers message and one answer. A request for more
// time may precede the answer. Envoy resets the stream of an admitted request as soon as it
// has read the answer, and the server waits for that. So Canceled is the normal end of a
// stream, not an error. A half-close is no such sign, because it may cross the answer.
//
// # What breaks the guarantees
//
// An Envoy that is configured otherwise than package envoy does it, or that resets a stream
// before it has read the answer and still uses the answer.
package extproc
