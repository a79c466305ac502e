// Package teams decides whether a team may make a claim. It has the limits of the teams, and for each
// team with a limit on its rate the state of that limit. It is a pure ledger: it does no I/O, starts
// no goroutine, and receives the time as an argument. One goroutine uses it.
//
// The ledger does not count sandboxes and waiting claims. Its owner counts them from the tables that
// it has, and passes the numbers. So they are exact under a new leader as soon as that has recovered
// its tables.
//
// # The limits
//
//	MaxSandboxes     the sandboxes of a team that are not released, with those that its claims ask for
//	MaxWaiting       the calls of a team that wait for a pod, in all pools
//	ClaimsPerSecond  the sandboxes that a team claims, on average
//
// 0 is no limit. ClaimsPerSecond is a token bucket. It holds the tokens of one second, at least one.
// A sandbox costs one token. A claim of more sandboxes than the bucket holds needs a full bucket and
// leaves a debt. Later claims wait until it is paid, so the average stays exact.
//
// # Guarantees
//
//   - A claim that is refused costs no token.
//   - Within any time t a team is admitted at most ClaimsPerSecond * t sandboxes, a full bucket, and
//     once the sandboxes of its largest claim. A change of leaders fills the bucket.
//   - A new limit counts for the next claim. It ends no sandbox and no wait.
//   - The wait that a refusal names is exact: a claim of the same size is admitted then if no other
//     claim of the team comes before it.
//
// # What breaks them
//
// A time that goes back.
package teams
