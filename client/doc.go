// Package client calls Berth's HTTP API. It wraps the client that is generated from the API's
// document (api/openapi); requests and answers have the types of that package.
//
// A Client holds no state but its connections. Its methods may be called concurrently.
//
// An Agent runs commands and moves files in a sandbox whose pool has the agent. It calls the agent through the
// gateway, each call once.
//
// # Guarantees
//
//   - An answer other than success is an *Error with the status, the reason and the message of the
//     API. IsNotFound, IsLimit and IsRefused sort errors.
//   - A claim is never made twice. Claim and ClaimBatch send an Idempotency-Key, so that a
//     repeated claim gets the sandbox of the first one.
//   - A call is repeated at most three times, and only if a second one has no further effect.
//     DeclareDead and Snapshot are never repeated, and Scale not with a generation. A repeated call
//     waits for as long as Retry-After says, else 0.1 s, doubled each time and randomly shortened.
//   - A call is repeated after a broken connection, after 502, 503 and 504, and after a claim that
//     came too early (rate_limited). It is not repeated after other answers: a lack of pods or
//     a quota (429) is the caller's to wait for, with waitTimeout for example.
//   - A call does not wait beyond the deadline of its context. It returns the latest error instead.
//   - The key goes to no other host: redirects are errors, unless Options.HTTP follows them.
//
// # What breaks them
//
// A claim whose context ends may have taken a sandbox, which stays until its end. ClaimOnce with
// the same key finds it.
package client
