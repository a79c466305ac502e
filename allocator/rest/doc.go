// Package rest is the allocator's HTTP API. Package openapi has the document that describes it: each
// operation of the document is a method of api, and requests are checked against the document
// before they are carried out. Calls that E2B has too have the shapes of the E2B API, under / and
// /v2. All other calls are under /v1. A field or parameter that the API does not support is refused
// by name and never ignored.
//
// A call needs a key, in X-API-Key or as a bearer token. An API without keys is for a
// listener on loopback: it accepts only the hosts localhost, loopback addresses, the public
// host and api.<public host>. A follower forwards calls to the leader.
//
// A sandbox is released at its end (timeout), after its idle timeout without activity, or
// at its pool's maximum lifetime, whichever comes first. Without a timeout the end is after
// 300 s, or never if the claim has an idleTimeout other than 0. A new timeout replaces the
// old one and may be shorter.
//
// A claim waits for a pod when its pool has none. With an Idempotency-Key header it can be
// repeated safely: while its sandbox is live, and for ten minutes after that, the same key
// with the same body gets the same sandbox.
//
// The 204 of a release means that the release is durable, and that every router that
// is connected, or was heard in the last 10 s, has acknowledged it, or that one second has
// passed. The header Berth-Routers-Outstanding is the number of routers that have not.
//
// # Guarantees
//
//   - No call blocks another one by waiting, sending slowly or reading slowly: each class of
//     calls has bounds for slots, request bodies and answers.
//   - The calls of one team leave slots, and room for bodies and answers, to other teams.
//   - A call is forwarded at most once, and an unknown outcome is reported as such.
//
// # What breaks them
//
// A proxy that repeats POST requests without an Idempotency-Key: each repetition claims
// another sandbox.
package rest
