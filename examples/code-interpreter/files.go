// Package codeinterpreter has the files of the example: the program, what it needs, and a pool.
package codeinterpreter

import "embed"

// Files are the files of this folder that a pool on a process node needs.
//
//go:embed kernel.py server.py requirements.txt pool.yaml
var Files embed.FS
