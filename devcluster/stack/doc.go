// Package stack runs Berth on a devcluster: allocators, and gateways of one Envoy and
// one router each. Every one is a process of its own that a test can kill, pause and
// start again.
package stack
