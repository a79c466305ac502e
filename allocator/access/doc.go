// Package access says who calls the HTTP API and what they may do.
//
// A caller presents an API key, which has a name, a team and a role. An operation of the OpenAPI
// document names the role that it needs (x-berth-role). An admin sees the sandboxes of every team;
// every other caller sees those of its own team, and for it a sandbox of another team does not
// exist.
package access
