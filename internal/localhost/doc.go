// Package localhost checks the Host header of requests to a listener that only loopback
// protects.
//
// The host name of a web page can resolve to 127.0.0.1 (DNS rebinding). A browser then sends
// requests of that page to the listener as same-origin requests. Only the name in the Host
// header reveals them.
package localhost
