package initbox

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"unicode/utf8"
)

// Limits of a Config.
const (
	// MaxValues bounds what a claim brings, in bytes: the names and values of Envs and Secrets, and
	// the paths and contents of Files, all together.
	MaxValues = 256 << 10
	// MaxEntries bounds the number of Envs, Secrets and Files together.
	MaxEntries = 1000
	// maxID bounds SandboxID, AccessToken, DefaultUser, Workdir and Proxy. maxPath bounds a path.
	maxID   = 1024
	maxPath = 4096
)

// Config is what an agent is configured with.
type Config struct {
	// SandboxID is the sandbox that the pod holds from now on. Required.
	SandboxID string `json:"sandboxID"`
	// AccessToken is what requests to the agent carry in X-Access-Token. Required.
	AccessToken string `json:"accessToken"`
	// Public: requests need no token.
	Public bool `json:"public,omitempty"`
	// Envs are environment variables of every process that the agent starts. A request for a process
	// can override them. Clients that have the token can read them.
	Envs map[string]string `json:"envs,omitempty"`
	// Secrets are environment variables like Envs, and win over Envs of the same name. The agent
	// shows them in no answer and writes them to no file. Processes of the sandbox can read them.
	Secrets map[string]string `json:"secrets,omitempty"`
	// Files are written before the agent answers.
	Files []File `json:"files,omitempty"`
	// DefaultUser runs what names no user. Empty: the agent chooses.
	DefaultUser string `json:"defaultUser,omitempty"`
	// Workdir is where processes start that name no directory. Empty: the home of their user.
	Workdir string `json:"workdir,omitempty"`
	// Proxy is the URL of the egress gateway with the credential of the sandbox, in variables of every process that the
	// agent starts. Envs win over them. It is in no archive. Empty: there is none.
	Proxy string `json:"proxy,omitempty"`
	// Stopped: the sandbox was stopped, and its agent has restored its files. Envs, Secrets, Files, DefaultUser and
	// Workdir are those of the configuration that was in the archive. They must not be set.
	Stopped bool `json:"stopped,omitempty"`
}

// File is a file that is written at the claim. Its directories are made. It belongs to the default user.
type File struct {
	// Path is absolute, or relative to the home of the default user.
	Path string `json:"path"`
	Data []byte `json:"data"`
	// Mode has the permission bits; 0: 0644.
	Mode uint32 `json:"mode,omitempty"`
}

// TooLargeError is the error of a Config that brings more than MaxValues or MaxEntries.
type TooLargeError struct{ what string }

func (e *TooLargeError) Error() string { return e.what }

// Check returns an error that names the first field that no agent accepts. It quotes names and paths,
// never a value.
func (c *Config) Check() error {
	if c.SandboxID == "" || c.AccessToken == "" {
		return errors.New("sandboxID and accessToken: must be set")
	}
	for _, f := range []struct{ name, value string }{
		{"sandboxID", c.SandboxID}, {"accessToken", c.AccessToken}, {"defaultUser", c.DefaultUser}, {"workdir", c.Workdir},
		{"proxy", c.Proxy},
	} {
		if err := text(f.name, f.value, maxID); err != nil {
			return err
		}
	}
	if c.Stopped && len(c.Envs)+len(c.Secrets)+len(c.Files)+len(c.DefaultUser)+len(c.Workdir) > 0 {
		return errors.New("stopped: envVars, secrets, files, defaultUser and workdir come from the archive: leave them out")
	}
	return CheckValues(c.Envs, c.Secrets, c.Files)
}

// CheckValues is Check for what a claim brings. The error is a *TooLargeError, or names the field.
func CheckValues(envs, secrets map[string]string, files []File) error {
	entries := len(envs) + len(secrets) + len(files)
	if entries > MaxEntries {
		return &TooLargeError{fmt.Sprintf("envVars, secrets and files: %d in all, at most %d", entries, MaxEntries)}
	}
	size := 0
	for _, m := range []struct {
		field  string
		values map[string]string
	}{{"envVars", envs}, {"secrets", secrets}} {
		for name, value := range m.values {
			size += len(name) + len(value)
			if err := variable(m.field, name, value); err != nil {
				return err
			}
		}
	}
	seen := make(map[string]bool, len(files))
	for i, f := range files {
		size += len(f.Path) + len(f.Data)
		if err := f.check(); err != nil {
			return fmt.Errorf("files[%d].%w", i, err)
		}
		p := path.Clean(f.Path)
		if seen[p] {
			return fmt.Errorf("files[%d].path: %q is there twice", i, f.Path)
		}
		seen[p] = true
	}
	if size > MaxValues {
		return &TooLargeError{fmt.Sprintf(
			"envVars, secrets and files: %d bytes in all, at most %d; write larger files after the claim", size, MaxValues)}
	}
	return nil
}

// variable checks what execve(2) and JSON cannot carry: a name ends at the first "=", and both end at a
// zero byte.
func variable(field, name, value string) error {
	switch {
	case name == "":
		return fmt.Errorf("%s: a name must not be empty", field)
	case len(name) > maxID:
		return fmt.Errorf("%s: a name of %d bytes, at most %d", field, len(name), maxID)
	case strings.ContainsAny(name, "=\x00") || !utf8.ValidString(name):
		return fmt.Errorf("%s: the name %q must be UTF-8 and have neither = nor a zero byte", field, name)
	case !utf8.ValidString(value):
		return fmt.Errorf("%s: the value of %q is not UTF-8", field, name)
	case strings.ContainsRune(value, 0):
		return fmt.Errorf("%s: the value of %q must not have a zero byte", field, name)
	}
	return nil
}

func (f File) check() error {
	if err := text("path", f.Path, maxPath); err != nil {
		return err
	}
	switch {
	case f.Path == "":
		return errors.New("path: must not be empty")
	case strings.HasSuffix(f.Path, "/") || path.Clean(f.Path) == "." || path.Base(f.Path) == "..":
		return fmt.Errorf("path: %q names a directory", f.Path)
	case f.Mode > 0o777:
		return fmt.Errorf("mode: %#o has more than permission bits (at most 0777)", f.Mode)
	}
	return nil
}

func text(field, value string, most int) error {
	switch {
	case len(value) > most:
		return fmt.Errorf("%s: %d bytes, at most %d", field, len(value), most)
	case strings.ContainsRune(value, 0):
		return fmt.Errorf("%s: must not have a zero byte", field)
	case !utf8.ValidString(value):
		return fmt.Errorf("%s: is not UTF-8", field)
	}
	return nil
}
