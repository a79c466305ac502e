// Package contexts keeps what the command berth needs to find an installation of Berth: its
// contexts. A person writes them to the configuration file. Every running development cluster has
// one in the cache.
//
// # Guarantees
//
//   - A file holds no key, only the path of a file with the key.
//   - A file is written as a whole or not at all. A field that is not known is an error.
//   - Development returns only clusters whose process runs.
package contexts

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"sigs.k8s.io/yaml"
)

// Context says how to reach one installation. Every field is optional but APIURL.
type Context struct {
	APIURL string `json:"apiURL"`
	// APIKeyFile is a file with the key for the API.
	APIKeyFile string `json:"apiKeyFile,omitempty"`
	// CAFile has certificates, in PEM, that are trusted besides the system's.
	CAFile string `json:"caFile,omitempty"`
	// Gateway is the host:port to connect to for every sandbox, where their names do not resolve.
	Gateway string `json:"gateway,omitempty"`
	// Kubeconfig and Namespace are for the commands that read the cluster.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	Namespace  string `json:"namespace,omitempty"`
	// PID is the process of a development cluster.
	PID int `json:"pid,omitempty"`
}

// File is the configuration file.
type File struct {
	// Current is the context that is used if none is named.
	Current  string             `json:"current,omitempty"`
	Contexts map[string]Context `json:"contexts,omitempty"`
}

// Path returns the path of the configuration file: $BERTH_CONFIG, else berth/config.yaml in
// $XDG_CONFIG_HOME or in ~/.config.
func Path() (string, error) {
	if path := os.Getenv("BERTH_CONFIG"); path != "" {
		return path, nil
	}
	if dir := os.Getenv("XDG_CONFIG_HOME"); dir != "" {
		return filepath.Join(dir, "berth", "config.yaml"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the configuration file: %w; set BERTH_CONFIG to its path", err)
	}
	return filepath.Join(home, ".config", "berth", "config.yaml"), nil
}

// Load reads the configuration file. A missing file is empty.
func Load(path string) (f File, err error) {
	err = read(path, &f)
	return f, err
}

// Save writes the configuration file, readable by its owner only.
func (f File) Save(path string) error { return write(path, f) }

// Development returns the contexts of the development clusters that run, by name.
func Development() (map[string]Context, error) {
	dir, err := developmentDir()
	if err != nil {
		return nil, err
	}
	paths, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	all := map[string]Context{}
	for _, path := range paths {
		var c Context
		if err := read(path, &c); err != nil {
			return nil, err
		}
		// EPERM means that the process runs as another user.
		if err := syscall.Kill(c.PID, 0); c.PID > 0 && (err == nil || errors.Is(err, syscall.EPERM)) {
			all[strings.TrimSuffix(filepath.Base(path), ".yaml")] = c
		}
	}
	return all, nil
}

// Publish makes a development cluster of this process findable until withdraw is called or the
// process ends.
func Publish(name string, c Context) (withdraw func() error, err error) {
	dir, err := developmentDir()
	if err != nil {
		return nil, err
	}
	c.PID = os.Getpid()
	path := filepath.Join(dir, name+".yaml")
	return func() error { return os.Remove(path) }, write(path, c)
}

// developmentDir lies in the cache directory of development clusters.
func developmentDir() (string, error) {
	dir := os.Getenv("BERTH_CACHE")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find the cache directory: %w; set BERTH_CACHE to a directory", err)
		}
		dir = filepath.Join(cache, "berth")
	}
	return filepath.Join(dir, "contexts"), nil
}

// Names returns the names of contexts, sorted.
func Names(all map[string]Context) []string { return slices.Sorted(maps.Keys(all)) }

func read(path string, into any) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := yaml.UnmarshalStrict(raw, into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func write(path string, from any) error {
	raw, err := yaml.Marshal(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
