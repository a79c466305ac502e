// Package crd holds the CustomResourceDefinitions generated from api/v1alpha1.
package crd

import (
	"embed"
	"fmt"
)

//go:embed *.yaml
var files embed.FS

// All returns every CRD, one YAML document each.
func All() [][]byte {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(fmt.Sprintf("embedded CRDs: %v", err)) // cannot happen: compiled in
	}
	var all [][]byte
	for _, e := range entries {
		raw, err := files.ReadFile(e.Name())
		if err != nil {
			panic(fmt.Sprintf("embedded CRD %s: %v", e.Name(), err))
		}
		all = append(all, raw)
	}
	return all
}
