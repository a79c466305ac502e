// Command allocator runs one replica of the control plane.
package main
