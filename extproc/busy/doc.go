// Package busy asks a sandbox whether it is working although no request for it is open.
//
// # Guarantees
//
//   - The program in the sandbox is not trusted. One attempt costs at most one connection,
//     200 ms and a few KB, whatever the program answers.
//   - Only the status of the answer counts. No body is read and no redirect is followed.
//   - Ask ends within 4 s, or when its context ends.
package busy
