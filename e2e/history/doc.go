// Package history defines what a test under faults writes down, and judges it.
//
// A history is a file with one event per line, in JSON. An event is a call with its
// answer, a request, what a pod received, a fault, or what was on record at the end.
// Kind lists all kinds and the fields of each. The suites soak, reaping, chaos and
// routing write the same format.
//
// # Judges
//
// A judge is a function that looks for one kind of violation. It reads the history and
// nothing else, so it finds the same each time it is asked. Judges lists the judges of
// each suite, and "go run ./e2e/judge FILE" runs them on a file again. The comment of each
// judge states its rule.
//
// # Clocks
//
// Began and Ended are nanoseconds since the machine was booted, suspended time included,
// which all processes of a machine read alike. Began is taken before the first step of
// what the event is about, and Ended after the last one. What ended before another event
// began therefore happened before it. Fields of type time.Time are by a wall clock. Those
// of Sandbox objects are by the clock of the allocator that led then, which is off by one
// of Settings.Offsets if these are set.
//
// The order of the lines has no meaning.
package history
