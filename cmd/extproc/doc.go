// Command extproc is the router: the ext_proc server beside one Envoy.
//
// A process starts in this order: it joins the allocator, binds its socket when it has routes
// (or after 2 s), and answers Envoy. It ends in this order: it answers the requests in
// progress, sends Goodbye to the leader, and stops its HTTP listeners.
package main
