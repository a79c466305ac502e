// Package extproc is the router: Envoy asks it about every request, and it
// answers where the request goes or why it goes nowhere.
//
// # Guarantees
//
//   - A request is admitted only by an answer that names a destination and a
//     sandbox ID. Whatever goes wrong, no destination is named.
//   - Only the host decides. No header overrides it, and a host with anything
//     left over after parsing is refused.
//   - A destination lies in Options.PodCIDRs.
//   - The activity of an admitted request is recorded before Envoy is answered.
//   - The ports of one sandbox that can be asked for at one time are bounded, so that
//     one client cannot make Envoy's list of open requests long: see package lastactive.
//   - While a sandbox is quiesced no request for it is admitted. It waits for the
//     verdict, for 2 s at most, and is refused if there is none: the router never goes
//     on by itself.
//   - A release is acknowledged only when Envoy has read every answer that was given
//     before it: see Answers.
//
// One ext_proc stream carries one request-headers message and one answer, or before
// that a wish for more time. Envoy resets the stream of an admitted request as soon
// as it has read the answer, and the server waits for that; so Canceled is the normal
// end of a stream and not an error.
// The server never answers gRPC status Unavailable for a failure of its own:
// Envoy would ask again, thirty times.
package extproc
