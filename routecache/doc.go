// Package routecache is what one router knows about where sandboxes are.
//
// # Guarantees
//
//   - Gone stays gone. Once Release(id) has returned, no Lookup of id finds a
//     route again, whatever answers and pushes for id are still under way; one
//     that found it before may be on its way back to its caller. IDs are never
//     used twice, so a tombstone needs no end; the tombstones are bounded, and
//     one that was dropped makes the answer "unknown" or a new question, never a
//     route that was learned before.
//   - Nothing old is served. A Lookup finds a route only while the cache is
//     fresh: until the latest moment given to SetFreshUntil, judged on a clock
//     that counts suspended time, or until Expire.
//   - One question per ID. While a question for an ID is open, every Lookup of
//     that ID waits for the same answer. A caller that gives up leaves the
//     question to the others.
//   - A push wins. Put and Release answer open questions for their ID and
//     remove a negative entry at once.
//   - Whoever awaits a sandbox that is starting, or quiesced, looks again as soon as it
//     runs, is resumed or gone, or a snapshot has come.
//   - Quiesced stays quiesced. Once Quiesce(id) has returned, no route of id is found
//     and none holds, until Resume, Release or Replace. No push, answer, eviction,
//     disconnection or time goes on by itself.
//   - Bounded memory: routes, negative entries, tombstones, open questions and
//     quiesced IDs each have a limit. Over that of questions Lookup fails at once, over
//     the last one Quiesce does.
//
// # How
//
// The allocator's stream is ordered, and the cache is told what arrives on it
// in that order: Replace for a snapshot, Put, Release, Resolve for the answer
// to a question, Quiesce and Resume. So "which is newer" never has to be asked. What breaks the
// guarantees is calling those methods out of the stream's order, or from a
// stream that has been replaced by another; the caller must not.
//
// There is no I/O in here, no goroutine, and the clock is passed in. All
// methods may be called concurrently.
package routecache
