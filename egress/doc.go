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
//   - A header that the router sets goes to its host and port only, over TLS, and replaces that of the client. A
//     request that needs a header whose value is not known is refused.
//   - Until the first [Server.Replace], and while Options.Fresh is false, every request is refused.
//   - [Server.Set], [Server.Forget] and [Server.Replace] take effect at once, in the order of the calls: no request is
//     admitted any more that they refuse. They wait for nothing.
//   - [Server.Barrier] says when every request has ended at Envoy that the calls before it took away.
//   - The open requests of one sandbox, their rate, that to one origin, and its look-ups at one time are bounded for
//     that sandbox. The look-ups of a pool are bounded, too.
//   - No address has more connections than its share, whatever it does with them, and none opens without the router.
//   - The allocator is asked about a sandbox that is not known, once at a time, and the requests of the sandbox wait
//     for the answer for at most a second. The questions are bounded in number and in time, also those of one address.
//   - No request outlives the router that has admitted it.
//   - [Server.Counts] has no byte that has not passed, and none of another pod. What is kept for it is bounded for each
//     sandbox, and refusals displace no destination that was admitted.
//   - No line of the log, and no count, has a path, a header or a credential.
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
// # Shares
//
// Envoy asks about each new connection, by the service for rate limits, before it reads from it. It has no count of the
// connections of one source, and the router sees no connection end. But both share the network namespace of their pod,
// so the router reads in /proc/net how many each address has. What an address has is at most what the newest look has
// found, without those that waited for it, and what was admitted since. If that is too much the connection waits for
// a new look, for about 0.1 s, or longer if a look takes long, which it does with many connections that ended in the
// last minute. So nothing must be reported, nothing is lost by a restart, and without looks nothing more is admitted.
//
// With M = Options.MaxConnections, and all connections counted:
//
//   - An address gets at most 1/40 of those that are free: M/41 if it is alone. So n addresses that take what they can
//     leave M x (40/41)^n: 100 leave 8%, of which another one gets its 40th.
//   - Beside these, as many again may wait for a look. A connection that is to be refused is open until Envoy has the
//     answer. Envoy accepts 32 between two passes over its sockets.
//   - A tunnel is one connection, because Envoy speaks HTTP/1.1. With the one to its origin it takes at most
//     envoy.EgressConnectionMemory, so M of them must fit into the memory of Envoy, and the chart checks that. The
//     default of the open requests is M/50, so that the answer says why before a connection is closed.
//   - 100 connections per second of one address are accepted, and 1,000 at once. Others wait for up to 2 s.
//   - Refused requests take from the same bucket, and their answers wait as long. So new connections of an address that
//     was refused too often may be closed. A router that is not ready takes none, and each of its refusals waits
//     for 0.25 s. A connection has one request at a time. So an address costs no more refusals per second, however it
//     sends them. Envoy closes the connection after a refusal of its own.
//   - A request to one address and port takes a token, 30 per second and 1,000 at once: 2,800 in a minute, which is how
//     long a port is in use after its connection, of the 55,296 that the chart gives the pod. Twenty sandboxes could
//     take all of them towards one origin.
//   - The router remembers at most 2M addresses, 64 buckets for each sandbox, and 512 hashes of destinations.
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
//   - A sandbox that opens connections faster than Envoy can close them, some thousands per second, delays the new
//     ones of others, which wait in the same queue of the kernel. Nothing without rights in the kernel can prevent
//     that.
//   - A connection to an origin serves one plain request. Only with TLS, which is for hosts that get a header, it stays
//     open for 5 s after it. Then it takes memory and counts for no share.
//   - While an Envoy stands still, no barrier is passed that waits for one of its requests, and none after it.
//   - Addresses share 1,024 buckets for questions to the allocator. So may a few of them with a hostile one.
//   - The bounds are those of one gateway. With several each has its own.
package egress
