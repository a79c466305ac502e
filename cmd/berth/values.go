package main

import (
	"encoding/base64"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/berth-sandbox/berth/api/openapi"
)

// valueFlags are what a claim gives to the agent of the sandbox.
type valueFlags struct {
	Env     []string `name:"env" short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable in the sandbox. Can be repeated."`
	EnvFile []string `name:"env-file" sep:"none" placeholder:"FILE" help:"File with a NAME=VALUE in each line; empty lines and those that begin with # do not count. Can be repeated."`
	Secret  []string `name:"secret" sep:"none" placeholder:"NAME=FILE" help:"Environment variable that the agent does not show. The file has its value, - for standard input; one newline at the end is left out. Can be repeated."`
	File    []string `name:"file" sep:"none" placeholder:"SOURCE:PATH[:MODE]" help:"File to write into the sandbox, such as config.json:/etc/app/config.json:0600. Can be repeated."`
}

// into reads the values and puts them into a claim. The API checks names, paths and sizes.
func (f *valueFlags) into(claim *openapi.NewSandbox, stdin io.Reader) error {
	var err error
	for _, file := range f.EnvFile {
		raw, readErr := os.ReadFile(file)
		if readErr != nil {
			return usage("--env-file: %v", readErr)
		}
		for i, line := range strings.Split(string(raw), "\n") {
			line = strings.TrimSuffix(line, "\r")
			if trimmed := strings.TrimSpace(line); trimmed == "" || trimmed[0] == '#' {
				continue
			}
			if !put(&claim.EnvVars, line) {
				return usage("--env-file %s, line %d: must be NAME=VALUE", file, i+1) // it may be a secret
			}
		}
	}
	for _, pair := range f.Env {
		if !put(&claim.EnvVars, pair) {
			return usage("--env: must be NAME=VALUE")
		}
	}
	for _, pair := range f.Secret {
		name, file, ok := strings.Cut(pair, "=")
		if !ok {
			return usage("--secret: must be NAME=FILE, or NAME=- for standard input; a value in the arguments could be seen by others")
		}
		var value []byte
		switch {
		case file == "-" && stdin == nil:
			return usage("--secret: only one of them can come from standard input")
		case file == "-":
			value, err = io.ReadAll(stdin)
			stdin = nil
		default:
			value, err = os.ReadFile(file)
		}
		if errors.Is(err, os.ErrNotExist) {
			return usage("--secret %s: its file does not exist", name) // its name may be the value
		} else if err != nil {
			return usage("--secret %s: %v", name, err)
		}
		put(&claim.Secrets, name+"="+strings.TrimSuffix(string(value), "\n"))
	}
	for _, text := range f.File {
		file, err := readFile(text)
		if err != nil {
			return err
		}
		claim.Files = append(claim.Files, file)
	}
	return nil
}

// put adds NAME=VALUE to variables.
func put(to *map[string]string, pair string) bool {
	name, value, ok := strings.Cut(pair, "=")
	if !ok {
		return false
	}
	if *to == nil {
		*to = map[string]string{}
	}
	(*to)[name] = value
	return true
}

// readFile reads the file of SOURCE:PATH[:MODE].
func readFile(text string) (file openapi.NewFile, err error) {
	parts := strings.Split(text, ":")
	const least, most = 2, 3
	if len(parts) < least || len(parts) > most || parts[0] == "" || parts[1] == "" {
		return file, usage("--file %q: must be SOURCE:PATH or SOURCE:PATH:MODE, without other colons", text)
	}
	raw, err := os.ReadFile(parts[0])
	if err != nil {
		return file, usage("--file: %v", err)
	}
	file = openapi.NewFile{Path: parts[1], Content: base64.StdEncoding.EncodeToString(raw), Encoding: new(openapi.Base64)}
	if len(parts) == most {
		file.Mode = &parts[2]
	}
	return file, nil
}
