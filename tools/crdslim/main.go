// Command crdslim removes the descriptions below spec.template from the CRD
// files named on its command line, in place: a pod template's descriptions are
// Kubernetes' own and make a file ten times as long, and a server-side limit
// for annotations is 256 KiB. Ours stay, for kubectl explain.
package main

import (
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

func main() {
	for _, file := range os.Args[1:] {
		if err := slim(file); err != nil {
			fmt.Fprintf(os.Stderr, "crdslim: %s: %v\n", file, err)
			os.Exit(1)
		}
	}
}

func slim(file string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var crd map[string]any
	if err := yaml.Unmarshal(raw, &crd); err != nil {
		return err
	}
	strip(crd, false)
	if raw, err = yaml.Marshal(crd); err != nil {
		return err
	}
	return os.WriteFile(file, append([]byte("---\n"), raw...), 0o644)
}

// strip drops every description below a property named template.
func strip(node any, below bool) {
	switch node := node.(type) {
	case map[string]any:
		if text, ok := node["description"].(string); ok && below && text != "" {
			delete(node, "description")
		}
		for key, child := range node {
			strip(child, below || key == "template")
		}
	case []any:
		for _, child := range node {
			strip(child, below)
		}
	}
}
