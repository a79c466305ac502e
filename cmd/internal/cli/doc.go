// Package cli is the common part of Berth's commands: flags with environment variables, logs,
// HTTP listeners and signals.
//
// # Guarantees
//
//   - Every error of Parse names the flag.
//   - A process ends within a second after its run function has returned, even if no one reads
//     its stderr.
//   - Every HTTP connection has deadlines for its client: 5 s for the header of a request, 10 s
//     for all of it, 30 s to read the answer, and 2 minutes between requests.
//   - Every HTTP listener has a limit of connections. Above it the connection that has waited
//     longest for a request is closed. A connection with a call in progress is never closed.
package cli
