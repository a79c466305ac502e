// Package console is Berth's web console: pages for operators and for people who use sandboxes.
//
// The console is a client of the HTTP API and has no right of its own. It makes each page from answers to calls with
// the key of the person who looks at it, so the API decides about roles, teams and limits, writes the audit, and
// forwards to the leader. Each replica of the allocator can serve it, and so can the command "berth console" on the
// machine of a person.
//
// # Sessions
//
// A session is a cookie and nothing else: the API key and the time of the sign-in, sealed with AES-GCM. Every replica
// that has the sealing key opens it. It ends 12 hours after the sign-in, at the sign-out, and with the key: a call with
// a revoked key is refused, and so is the page. The API ends the stream of events of such a key.
//
// The cookie has the prefix __Host-, so a page of a sandbox cannot set it, and SameSite=Strict, so a page of another
// site cannot use it. A POST must come from a page of the console itself (Origin).
//
// # Guarantees
//
//   - A person does nothing through the console that the API would refuse the key.
//   - A request with a Host other than that of the console's URL, localhost or a loopback address is refused.
//   - A key is asked for only where the connection of the browser is protected: over TLS, or on this machine.
//   - Text of tenants and sandboxes is shown as text. Characters that a person cannot see, or that reorder others, are
//     shown as escape sequences.
//   - No page runs a script, loads a style or connects to a host that is not the console's own.
//   - The size of a page does not depend on the number of sandboxes.
//
// # What breaks them
//
// A proxy that ends TLS and passes requests of plain HTTP on without X-Forwarded-Proto. A console at a host below the
// domain of the sandboxes: the program refuses that at its start. Another person who can read the sealing key.
package console
