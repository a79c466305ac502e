// Package initbox carries the configuration of one sandbox, and orders to stop and continue its processes and to
// archive and restore its files, from the allocator to the agent in its pod. The allocator seals, the agent opens.
//
// # Protocol
//
//   - The agent makes a key pair when it starts. GET /init answers its public key, the version of
//     the box, and a digest of the ID of the sandbox that it was configured for: [Hello].
//   - The allocator has a static key pair, derived from the cluster's key ([NewSealer]). Every replica
//     has the same one. Its public key is in the environment of the agent ([PublicKeyEnv]).
//   - POST /init carries one box ([Sealer.Seal]): a version byte, a random nonce, and a NaCl box (X25519,
//     XSalsa20, Poly1305) of a [Config]. The agent opens it ([Keys.Open]).
//   - POST /sleep carries the box of an [Order] ([Peer.SealOrder], [Keys.OpenOrder]). Its key is derived from that of
//     configurations, so that a box of one kind never opens as the other. The answer is 200 with [Obeyed], 409 for an
//     order that is older than the newest one, 421 for another sandbox, or 422 with [Refusal].
//   - POST /archive carries the box of a [FilesOrder]. The answer is 200 with the archive and, behind it, one of two
//     trailers: [SummaryTrailer] if it is whole, else [FailureTrailer]. An archive without the first is not whole.
//     Other answers are 409 with [FilesRefusal], or 421.
//   - For a sandbox that is stopped, the order has a key ([FilesOrder.Seal]). The agent then sends its configuration
//     before the archive: the length of a box as four bytes, the highest first, and the box of [SealConfig].
//   - POST /restore carries the length of a box as four bytes, the highest first, the box of a [FilesOrder], and the
//     archive. While the agent works it sends 102 (Processing) every 10 s. The answer is 200 with [Summary], or 409 or
//     422 with [FilesRefusal]. With a key in the order, the configuration is in front of the archive, as above. Size
//     and SHA256 of the order are those of both together.
//
// # States of an agent
//
//	unconfigured  serves GET /init, POST /init and /health, and nothing else
//	restored      serves the same. A box for the sandbox whose files were restored configures it. A restore that has
//	              failed leaves an agent that is never configured. One that has restored a configuration too takes a
//	              box that asks for it ([Config.Stopped]), and no other. No other agent takes such a box
//	configured    for one sandbox ID, until the process ends. A box for the same ID is answered as the
//	              first one was and changes nothing. A box for another ID is refused
//
// # Guarantees
//
//   - An agent accepts only what a holder of the cluster's key has sealed for this agent process. A box
//     for another agent, or for an earlier process in the same pod, does not open.
//   - A changed box does not open. A box that is sent again configures nothing anew.
//   - Seal and Open accept the same configurations: [Config.Check]. Open returns no more than that,
//     whatever the bytes are, and uses memory in proportion to [MaxSealed] at most.
//   - No error of this package has a value in it: neither of a variable, nor of a secret or file.
//   - The configuration of a sandbox that is stopped leaves the agent only sealed, with a key that only the allocators
//     can compute, and that came in a sealed order.
//
// # Who can read what
//
//   - The cluster's key, and what is derived from it: the allocators. It is in no pod of a pool.
//   - The public key of the allocator: everyone who may read pods. It opens nothing.
//   - The values of a sandbox: the leader, in its memory, until the delivery ends; then the agent in its
//     pod, and the processes of that sandbox. Neither the network nor the API server sees them. While the sandbox is
//     stopped they are in the object store, sealed.
//
// # What breaks them
//
// Someone who answers at the pod's address in place of the pod when the allocator asks for the public
// key. The agent has no secret before the claim with which it could prove who it is, so the
// allocator trusts addresses of pods as the gateway does when it sends requests there. Who can read the
// memory of the agent, such as root in the pod or on its node, can read the values.
package initbox
