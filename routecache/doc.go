// Package routecache holds what one router knows about where sandboxes are.
//
// # Guarantees
//
//   - Gone stays gone. After Release(id) has returned, no Lookup of id finds a
//     route, whatever answers and pushes for id are still under way. A Lookup that
//     found the route earlier may still be returning it to its caller. Sandbox IDs
//     are never reused, so a tombstone does not expire. It keeps the End of the first
//     release. The number of tombstones is
//     bounded. Without its tombstone an ID is answered with "unknown" or with a new
//     question, never with a route that was learned before the release.
//   - No stale route is served. A Lookup finds a route only while the cache is
//     fresh: until the latest moment given to SetFreshUntil, on a clock that
//     counts suspended time, or until Expire.
//   - Closed until the next route. After Close(id) has returned, no Lookup finds a
//     route of id and Holds is false, until a push or an answer has one. The route of
//     a sandbox that is asleep is no route: only the Answer has it.
//   - One question per ID. While a question about an ID is open, every Lookup of
//     that ID waits for the same answer. A caller that gives up does not end the
//     question for the others.
//   - One wake per ID. All Wakes of an ID share one question with wake, however many
//     there are, for as long as its answer is kept. A Wake that has waited for a
//     question of a Lookup asks again if the sandbox is asleep.
//   - A push wins. Put and Release answer open questions about their ID and
//     remove a negative entry at once.
//   - AwaitJoined returns as soon as the allocator can be asked and the cache is fresh.
//   - Await returns as soon as the sandbox runs, is closed, asleep, quiesced, resumed
//     or gone, or a snapshot has replaced the cache.
//   - Quiesced stays quiesced. After Quiesce(id) has returned, no Lookup finds a
//     route of id and Holds is false, until Resume, Release or Replace. No push,
//     answer, eviction, disconnection or passing of time ends the state.
//   - Memory is bounded. Routes, negative entries, tombstones, open questions and
//     quiesced IDs each have a limit. Above the limit of questions Lookup fails at
//     once. Above the limit of quiesced IDs Quiesce reports false.
//
// # How
//
// A caller that may not wait and may not allocate uses Find and then Holds. Others use Lookup. Known says
// whether Lookup would wait.
//
// What ends a route: Release, Close, a Resolve that has no route, a Replace without the
// ID, or eviction. What hides a route and keeps it: the end of freshness, Expire, and Quiesce. The
// end of a stream does neither; Disconnected fails open questions only, and Connected says that
// new ones can be asked.
//
// The allocator's stream is ordered, and the caller applies its messages to the
// cache in that order: Replace for a snapshot, Put, Release, Close, Resolve for the answer
// to a question, Quiesce and Resume. The cache therefore never compares versions.
//
// What breaks the guarantees: calling these methods out of the order of the stream,
// or for a stream that another one has replaced. In the router only package extproc/admission
// calls them.
//
// The package does no I/O, starts no goroutine and receives its clock. All methods
// may be called concurrently.
package routecache
