package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing/fstest"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// The images that pools of people have, made from the programs of this machine: a cluster of the tests can pull
// none. Neither has the agent.
const (
	// pythonImage has Python, bash and some small programs.
	pythonImage = "berth-e2e/python:1"
	// bareImage has one static program, and nothing else: no shell, no accounts, no /tmp.
	bareImage = "berth-e2e/bare:1"
)

// writeImages writes the archives of the images to a directory, and returns their files.
func writeImages(dir, demoSandbox string) ([]string, error) {
	var written []string
	for reference, make := range map[string]func() (fstest.MapFS, error){
		pythonImage: pythonFiles,
		bareImage:   func() (fstest.MapFS, error) { return programOf(demoSandbox) },
	} {
		files, err := make()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", reference, err)
		}
		tag, err := name.NewTag(reference)
		if err != nil {
			return nil, err
		}
		file := filepath.Join(dir, path.Base(tag.RepositoryStr())+".tar")
		if err := writeImage(file, tag, files); err != nil {
			return nil, fmt.Errorf("image %s: %w", reference, err)
		}
		written = append(written, file)
	}
	return written, nil
}

func writeImage(file string, tag name.Tag, files fstest.MapFS) error {
	for f := range files {
		for dir := path.Dir(f); dir != "."; dir = path.Dir(dir) {
			if files[dir] == nil {
				files[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
			}
		}
	}
	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	if err := errors.Join(w.AddFS(files), w.Close()); err != nil {
		return err
	}
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Architecture: "amd64", OS: "linux",
		RootFS: v1.RootFS{Type: "layers"}, Config: v1.Config{Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}}})
	if err != nil {
		return err
	}
	image, err = mutate.AppendLayers(image, static.NewLayer(packed.Bytes(), types.DockerUncompressedLayer))
	if err != nil {
		return err
	}
	return tarball.WriteToFile(file, tag, image)
}

// pythonFiles are Python with its standard library, bash, and the libraries that they need.
func pythonFiles() (fstest.MapFS, error) {
	files := fstest.MapFS{
		"etc/passwd": {Mode: 0o644, Data: []byte("root:x:0:0:root:/root:/bin/bash\nguest:x:500:500::/:/bin/bash\n")},
		"etc/group":  {Mode: 0o644, Data: []byte("root:x:0:\nguest:x:500:\n")},
		"tmp":        {Mode: fs.ModeDir | fs.ModeSticky | 0o777},
		"root":       {Mode: fs.ModeDir | 0o700},
	}
	line := regexp.MustCompile(`(?m)^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$`)
	add := func(file string) error {
		data, err := os.ReadFile(file)
		files[strings.TrimPrefix(file, "/")] = &fstest.MapFile{Mode: 0o755, Data: data}
		return err
	}
	const python = "/usr/bin/python3"
	foreign, err := exec.Command(python, "-c", `import _ctypes; print(_ctypes.__file__, end="")`).Output()
	if err != nil {
		return nil, fmt.Errorf("python3: %w", err)
	}
	programs := []string{python, string(foreign), "/bin/bash", "/bin/sh", "/bin/sleep", "/bin/stty", "/usr/bin/id"}
	for _, program := range programs {
		listed, err := exec.Command("ldd", program).Output()
		if err != nil {
			return nil, fmt.Errorf("ldd %s: %w", program, err)
		}
		for _, found := range append(line.FindAllStringSubmatch(string(listed), -1), []string{"", program}) {
			if err := add(found[1]); err != nil {
				return nil, err
			}
		}
	}
	const whereItIs = `import sysconfig; print(sysconfig.get_path("stdlib"), end="")`
	library, err := exec.Command(python, "-c", whereItIs).Output()
	if err != nil {
		return nil, fmt.Errorf("python3: %w", err)
	}
	return files, filepath.WalkDir(string(library), func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "__pycache__" || d.Name() == "test" || strings.HasPrefix(d.Name(), "config-")):
			return filepath.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		return add(file)
	})
}

// programOf returns the program demo-sandbox of its image.
func programOf(archive string) (fstest.MapFS, error) {
	image, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		return nil, err
	}
	layers, err := image.Layers()
	if err != nil {
		return nil, err
	}
	content, err := layers[len(layers)-1].Uncompressed()
	if err != nil {
		return nil, err
	}
	defer content.Close()
	for r := tar.NewReader(content); ; {
		h, err := r.Next()
		if err != nil {
			return nil, fmt.Errorf("no program in %s: %w", archive, err)
		}
		if path.Base(h.Name) == "demo-sandbox" {
			program, err := io.ReadAll(r)
			return fstest.MapFS{"demo-sandbox": {Mode: 0o755, Data: program}}, err
		}
	}
}
