// Package controltls secures the control stream between routers and allocators with mutual
// TLS 1.3, and the HTTP API with TLS.
//
// Both ends have a directory with tls.crt, tls.key and ca.crt: the files of a mounted Secret
// of type kubernetes.io/tls.
//
// # Guarantees
//
//   - An end accepts a certificate only if the authority in ca.crt has signed it for the right
//     use, client or server, and if it has the DNS name of the peer's role. The name stands
//     for the role and not for an address, because routers follow the leader from address to
//     address.
//   - Routers and egress routers have roles of their own: [CheckRole] tells them apart.
//   - The files are read again every 30 s. New connections use the new files. Open connections
//     stay open. Unusable files are logged by gRPC and change nothing.
//   - A replica that forwards a call to the leader's API verifies the role of the other end in the
//     same way.
//
// # What breaks them
//
// An authority that signs the name of a role for other programs.
package controltls
