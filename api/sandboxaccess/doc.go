// Package sandboxaccess makes and checks the credentials of one sandbox. The allocator makes them,
// and the router checks them.
//
// # Credentials
//
//   - The token opens every port. It is derived from the cluster's key and the sandbox ID, so every
//     leader can answer it again, and it is stored nowhere.
//   - The secret is the SHA-256 of the token. It is part of the route. It verifies the token, and
//     is the key of the other credentials. It is not the token: a router cannot make one.
//   - The agent token opens AgentPort only. E2B's SDKs send it there and send no token there.
//   - The egress token names the sandbox to the egress gateway. A new one comes with each incarnation. The gateway has
//     its SHA-256 only.
//   - A link opens one port in a browser until it expires. Its answer sets a cookie, which opens
//     the same port until the same moment.
//
// # Guarantees
//
//   - A credential of one sandbox opens no other sandbox: the ID is part of each.
//   - A credential of one kind is none of another kind, and a link or cookie of one port is none of
//     another port.
//   - Comparisons take the same time for every wrong value.
//   - The zero Secret verifies nothing.
//
// # What breaks them
//
// A key that leaks. A new key makes all credentials of all sandboxes invalid at once.
package sandboxaccess
