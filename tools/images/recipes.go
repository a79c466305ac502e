package main

import (
	_ "embed"
	"fmt"
	"os"
	"path"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	envoyImage = "envoy"
	binaries   = "/usr/local/bin"
	// user is also in the passwd file, because some programs look themselves up.
	user       = "65532:65532"
	repository = "https://github.com/berth-sandbox/berth"
)

//go:embed passwd
var passwd []byte

//go:embed group
var group []byte

// recipe is what one image is made of.
type recipe struct {
	title string
	// programs get a layer each, in this order. What images share comes first,
	// so that they share the layer too. The last one is the entry point.
	programs []string
}

func recipes() map[string]recipe {
	return map[string]recipe{
		"allocator":    {"Berth's control plane", []string{"berth", "allocator"}},
		"router":       {"Berth's router", []string{"berth", "extproc"}},
		"agent":        {"The agent in sandboxes of Berth", []string{"agent"}},
		"demo-sandbox": {"A sandbox for demos and tests of Berth", []string{"demo-sandbox"}},
		envoyImage: {"Envoy with the libraries of the machine that built this image, for tests of Berth",
			[]string{"envoy"}},
	}
}

func imageNames() []string {
	return []string{"allocator", "router", "agent", "demo-sandbox", envoyImage}
}

// spec is all that an image depends on, the content of the files included.
type spec struct {
	recipe
	name, version, arch string
	files               map[string]string // of each program, on this machine
	layerType           types.MediaType
}

func (s spec) reference() string { return "berth/" + s.name + ":" + s.version }

// layer is a group of files and what the history of the image calls them.
type layer struct {
	what string
	files
}

// layers returns the layers of the image, from the one that changes least.
func (s spec) layers() ([]layer, error) {
	account := files{}
	account.add("/etc/passwd", 0o644, passwd)
	account.add("/etc/group", 0o644, group)
	all := []layer{{"the user that the programs run as", account}}
	for _, name := range s.programs {
		file, path := s.files[name], path.Join(binaries, name)
		machine, dynamic, err := readProgram(file)
		switch {
		case err != nil:
			return nil, err
		case machine != machines[s.arch]:
			return nil, fmt.Errorf("%s is for %v, not for %s", file, machine, s.arch)
		case dynamic && s.name != envoyImage:
			return nil, fmt.Errorf("%s is not static", file)
		case dynamic:
			shared, err := sharedLibraries(file)
			if err != nil {
				return nil, err
			}
			authorities, err := publicAuthorities()
			if err != nil {
				return nil, err
			}
			all = append(all, layer{"certificates of public authorities", authorities},
				layer{"the dynamic loader and shared libraries", shared})
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		program := files{}
		program.add(path, 0o755, content)
		all = append(all, layer{path, program})
	}
	return all, nil
}

func (s spec) build() (v1.Image, error) {
	layers, err := s.layers()
	if err != nil {
		return nil, err
	}
	created := v1.Time{Time: epoch}
	built, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		Architecture: s.arch, OS: "linux", Created: created,
		RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			User: user, WorkingDir: "/", Env: []string{"PATH=" + binaries},
			Entrypoint: []string{path.Join(binaries, s.programs[len(s.programs)-1])},
			Labels: map[string]string{
				"org.opencontainers.image.title":    s.title,
				"org.opencontainers.image.version":  s.version,
				"org.opencontainers.image.source":   repository,
				"org.opencontainers.image.licenses": "Apache-2.0",
			},
		},
	})
	if err != nil {
		return nil, err
	}
	for _, l := range layers {
		packed, err := l.layer(s.layerType)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.what, err)
		}
		built, err = mutate.Append(built, mutate.Addendum{Layer: packed,
			History: v1.History{Created: created, CreatedBy: "tools/images: " + l.what}})
		if err != nil {
			return nil, err
		}
	}
	return built, nil
}
