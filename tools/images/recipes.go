package main

import (
	_ "embed"
	"fmt"
	"path"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
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
		"demo-sandbox": {"A sandbox for demos and tests of Berth", []string{"demo-sandbox"}},
		envoyImage: {"Envoy with the libraries of the machine that built this image, for tests of Berth",
			[]string{"envoy"}},
	}
}

func imageNames() []string { return []string{"allocator", "router", "demo-sandbox", envoyImage} }

// spec is all that an image depends on, the content of the files included.
type spec struct {
	recipe
	name, version, arch string
	files               map[string]string // of each program, on this machine
}

func (s spec) reference() string { return "berth/" + s.name + ":" + s.version }

func (s spec) build() (v1.Image, error) {
	p, err := platformOf(s.arch)
	if err != nil {
		return nil, err
	}
	var libraries, programs []file
	for _, name := range s.programs {
		program, err := readObject(s.files[name], path.Join(binaries, name))
		if err != nil {
			return nil, err
		}
		if program.machine != p.machine {
			return nil, fmt.Errorf("%s is for %v, not for %s", program.from, program.machine, s.arch)
		}
		if program.interpreter != "" && s.name != envoyImage {
			return nil, fmt.Errorf("%s is not static", program.from)
		}
		programs = append(programs, file{program.to, 0o755, program.content})
		needed, err := closure(program, p.directories)
		if err != nil {
			return nil, err
		}
		for _, library := range needed {
			libraries = append(libraries, file{library.to, 0o755, library.content})
		}
	}

	layers := []layer{{"the user that the programs run as",
		[]file{{"/etc/passwd", 0o644, passwd}, {"/etc/group", 0o644, group}}}}
	if len(libraries) > 0 {
		layers = append(layers, layer{"the dynamic loader and shared libraries", libraries})
	}
	for _, program := range programs {
		layers = append(layers, layer{program.path, []file{program}})
	}
	// A fixed time, as for all files: the time of building is no input.
	begin := v1.Time{Time: time.Unix(0, 0).UTC()}
	built, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		Architecture: s.arch, OS: "linux", Created: begin,
		RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			User: user, WorkingDir: "/", Env: []string{"PATH=" + binaries},
			Entrypoint: []string{programs[len(programs)-1].path},
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
		packed, err := l.pack()
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.what, err)
		}
		built, err = mutate.Append(built, mutate.Addendum{Layer: packed,
			History: v1.History{Created: begin, CreatedBy: "tools/images: " + l.what}})
		if err != nil {
			return nil, err
		}
	}
	return built, nil
}
