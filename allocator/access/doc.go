// Package access says who calls the HTTP API and what they may do.
//
// A caller presents an API key, which has a name, a team and a role. An operation of the OpenAPI
// document names the role that it needs (x-berth-role). An admin sees the sandboxes of every team;
// every other caller sees those of its own team, and for it a sandbox of another team does not
// exist.
//
// # Keys
//
// Keys are Secrets of type berth.sh/api-key in one namespace, one each. A Secret holds the SHA-256
// of its key, the team and the role. The key itself is stored nowhere.
//
// A set of keys is not loaded, or loaded. It is loaded once the Secrets have been listed, and stays
// loaded. Every change of a Secret replaces the whole set.
//
// # Guarantees
//
//   - A change of a Secret counts as soon as the watch has delivered it, without a restart.
//   - A replacement is visible to all waiters of ByTeam and Current. Equal keys replace nothing.
//   - While the API server is away the last set stays valid.
//   - A Secret that is incomplete, that has unknown data, that is being deleted, or whose key another
//     Secret holds too, opens nothing.
//   - A call before the set is loaded is not refused as unauthorized: its outcome is "try again".
//   - The time of a lookup reveals nothing about valid keys.
//
// # What breaks them
//
// A right to create Secrets in the namespace is the right to make keys of every role. A key that was
// revoked while the API server is away stays valid until the watch is back.
package access
