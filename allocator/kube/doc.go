// Package kube makes the allocator's API server clients, reads paged lists with them,
// and runs workers over a queue.
//
// # Guarantees
//
//   - [List] returns a complete list from the API server's store, or the error of its
//     context. It retries everything else.
//   - [Work] returns only after its last worker has ended.
//
// # What breaks them
//
// A page function that sets a resource version: the API server may then answer from
// its watch cache, which can be older than its store.
package kube
