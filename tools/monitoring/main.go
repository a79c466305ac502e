package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "monitoring:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: go run . DIRECTORY: the directory of the chart's files")
	}
	files, err := generate()
	if err != nil {
		return err
	}
	for name, content := range files {
		path := filepath.Join(args[0], name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// rulesFile has all rules, in Prometheus' format.
const rulesFile = "rules/berth.yaml"

// generate returns the files by name.
func generate() (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, d := range dashboards() {
		built, err := d.build()
		if err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", d.uid, err)
		}
		text, err := json.MarshalIndent(built, "", " ")
		if err != nil {
			return nil, err
		}
		files["dashboards/"+d.uid+".json"] = append(text, '\n')
	}
	text, err := yaml.Marshal(rules())
	if err != nil {
		return nil, err
	}
	files[rulesFile] = append([]byte("# make generate writes this file. docs/runbook.md says what to do about each alert.\n"), text...)
	return files, nil
}
