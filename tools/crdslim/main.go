// Command crdslim changes the CRD files named on its command line, in place:
//
//   - It removes the descriptions below spec.template. They are Kubernetes' own and make a file ten
//     times as long, and a server-side limit for annotations is 256 KiB.
//   - It joins the lines of the other paragraphs, because kubectl explain wraps them itself.
package main

import (
	"fmt"
	"os"
	"strings"

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

// strip drops every description below a property named template, and joins the lines of the others.
func strip(node any, below bool) {
	switch node := node.(type) {
	case map[string]any:
		if text, ok := node["description"].(string); ok && below && text != "" {
			delete(node, "description")
		} else if ok {
			node["description"] = joined(text)
		}
		for key, child := range node {
			template, ok := child.(map[string]any)
			if ok && key == "template" {
				for _, property := range template {
					strip(property, true) // its own description stays
				}
				if text, ok := template["description"].(string); ok {
					template["description"] = joined(text)
				}
				continue
			}
			strip(child, below)
		}
	case []any:
		for _, child := range node {
			strip(child, below)
		}
	}
}

// joined makes one line of each paragraph.
func joined(text string) string {
	paragraphs := strings.Split(text, "\n\n")
	for i, p := range paragraphs {
		paragraphs[i] = strings.Join(strings.Fields(p), " ")
	}
	return strings.Join(paragraphs, "\n\n")
}
