// Package rest is the allocator's HTTP API. Create, get, list and kill have the
// shapes of the E2B API, under / and /v2; what is accepted is carried out, and
// what is not carried out is refused by name, never dropped in silence.
//
//	POST   /sandboxes        claim a sandbox: 201, at the latest after the claim's wait
//	GET    /sandboxes        live sandboxes, oldest first: 200; ?limit= (1 to 100, 100 if left out); if
//	                         there are more, the header X-Next-Token has what to send as ?nextToken=
//	GET    /sandboxes/{id}   one live sandbox: 200, or 404
//	DELETE /sandboxes/{id}   release: 204, or 404
//	POST   /sandboxes/{id}/timeout       {"timeout":seconds}: the sandbox ends so long from now: 204, or 404
//	GET    /v1/sandboxes/{id}            why it is alive: its last activity, what that was, when it is
//	                                     released if it is not used any more, and for which routers that
//	                                     waits: 200, or 404
//	POST   /v1/sandboxes/{id}/keepalive  counts as activity: 204, or 404
//
// For operators, under /v1 (?limit=, 1 to 1,000, 100 if left out):
//
//	GET    /v1/admin/last-active           the same of every live sandbox: 200; ?id=, ?prefix=, ?pool=, ?format=text,
//	                                       ?limit= (1 to 10,000, 1,000 if left out)
//	GET    /v1/fences                      released sandboxes whose pods are kept, and whom they wait for: 200
//	GET    /v1/sessions                    routers, and how many fences wait for each: 200
//	POST   /v1/sessions/{id}/declare-dead  {"reason":"..."}: wait no longer for a router that has ended
//	                                       together with its Envoy: 200 when that is durable, 404,
//	                                       or 409 while it may live
//
// A call needs a key, in X-API-Key or as a bearer token, unless the API has no
// keys, which is for a listener on loopback only: it then answers only to localhost,
// to loopback addresses, and to the public host and api. before it. A replica that does not lead
// passes calls on to the one that does.
//
// A sandbox is released at its end (timeout), after its idle timeout without activity,
// or when its pool's maximum lifetime is over, whichever comes first. A claim without
// a timeout ends after 300 s, or not at all if it has an idleTimeout other than 0. A
// new timeout replaces the old one, and may be shorter.
//
// A claim waits for a pod when its pool has none. With an Idempotency-Key header
// it can be repeated safely: while its sandbox lives, and ten minutes after, the
// same key with the same body is answered with the same sandbox.
//
// 204 means that the release is durable and that every connected router has
// acknowledged it, or that one second has passed: the header
// Berth-Routers-Outstanding then says how many have not.
package rest
