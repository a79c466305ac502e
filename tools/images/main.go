// Command images builds Berth's container images as Docker archives, without a
// container runtime and without a base image. `docker load` and `kind load
// image-archive` take them. Run it from the top of the source tree:
//
//	go run ./tools/images [--version=0.2.0] [--arch=amd64] [--oci] [--output=bin/images] [name...]
//
// With --oci it builds OCI archives instead, each with an image for amd64 and one for arm64, as a release
// has them.
//
// What it promises, each with a test:
//
//   - The same inputs make the same archive, to the last byte. Inputs are the
//     source, the Go toolchain, the version, and for Envoy its binary and the
//     machine's libraries and certificates; not the time, nor where the tree lies, nor who builds.
//   - An image holds its programs in /usr/local/bin, the libraries they need, a
//     passwd and a group file, Envoy's also certificates of public authorities for the
//     egress gateway, and the directories above those; nothing can be
//     written by the user that the programs run as.
//   - The user is 65532:65532. The root file system may be read-only. There is no
//     shell and no /tmp.
//   - Berth's programs check the API server and the control stream against files
//     that are mounted.
//
// Berth's own programs are static. Envoy is not: its libraries and certificates are
// copied from this machine, so the envoy image is for tests. In production use Envoy's own
// image, and to publish Berth's, the Dockerfile beside this file.
//
// For each archive a line on stdout says its file, the image's name, its ID (the
// digest of its configuration, which covers all of its content; what `docker
// images --no-trunc` shows; of an OCI archive the digest of its index) and its size. Layers of Docker archives are
// not compressed: that is faster here, and what pushes an image compresses it.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/berth-sandbox/berth/internal/version"
)

type flags struct {
	Version  string   `default:"${version}" help:"Tag of the images and version that the programs print. Envoy's image has Envoy's."`
	Arch     string   `default:"${arch}" enum:"amd64,arm64" help:"Architecture of the images. Envoy's image: this machine's only."`
	OCI      bool     `help:"Build OCI archives with an image for each architecture."`
	Programs string   `help:"Keep the programs too, in a directory for each architecture below this one."`
	Output   string   `default:"bin/images" help:"Where the archives go."`
	Source   string   `default:"." help:"Top of the source tree."`
	Images   []string `arg:"" optional:"" name:"image" help:"Images to build, all if none is named: ${images}."`
}

// versionTag is what the distribution specification allows as a tag.
var versionTag = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f, err := parse(args, stdout, stderr)
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "berth-images-")
	if err != nil {
		return fmt.Errorf("scratch directory: %w", err)
	}
	defer os.RemoveAll(scratch)
	if err := os.MkdirAll(f.Output, 0o755); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	programs := cmp.Or(f.Programs, scratch)
	arches := []string{f.Arch}
	if f.OCI {
		arches = []string{"amd64", "arm64"}
	}
	files := map[string]map[string]string{}
	for _, arch := range arches {
		if files[arch], err = programsOf(ctx, f, arch, filepath.Join(programs, arch), stderr); err != nil {
			return err
		}
	}
	for _, name := range f.Images {
		s := spec{recipe: recipes()[name], name: name, version: f.Version, layerType: types.DockerUncompressedLayer}
		if f.OCI {
			s.layerType = types.OCILayer
		}
		var built []v1.Image
		for _, arch := range arches {
			s.arch, s.files = arch, files[arch]
			if name == envoyImage {
				if s.files["envoy"], s.version, err = findEnvoy(ctx, stderr); err != nil {
					return err
				}
			}
			image, err := s.build()
			if err != nil {
				return fmt.Errorf("image %s: %w", name, err)
			}
			built = append(built, image)
		}
		if err := write(f, &s, built, stdout); err != nil {
			return err
		}
	}
	return nil
}

// programsOf builds Berth's programs for the images and returns their files.
func programsOf(ctx context.Context, f *flags, arch, dir string, stderr io.Writer) (map[string]string, error) {
	files := map[string]string{}
	for _, name := range f.Images {
		for _, program := range recipes()[name].programs {
			if name != envoyImage {
				files[program] = filepath.Join(dir, program)
			}
		}
	}
	if len(files) == 0 {
		return files, nil
	}
	fmt.Fprintf(stderr, "images: building Berth's programs for %s (two or three minutes the first time)\n", arch)
	return files, buildPrograms(ctx, f, arch, slices.Sorted(maps.Keys(files)), dir, stderr)
}

// write writes the archive of an image and says what is in it.
func write(f *flags, s *spec, built []v1.Image, stdout io.Writer) error {
	file := filepath.Join(f.Output, s.name+".tar")
	var size int64
	id, err := built[0].ConfigName()
	if err == nil && !f.OCI {
		size, err = writeArchive(file, s.reference(), built[0])
	}
	if err == nil && f.OCI {
		var index v1.ImageIndex
		if index, err = ociIndex(built); err == nil {
			size, err = writeOCI(file, s.version, index)
		}
		if err == nil {
			id, err = index.Digest()
		}
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	fmt.Fprintf(stdout, "%s  %s  %s  %.1f MB\n", file, s.reference(), id, float64(size)/1e6)
	return nil
}

// parse ends the program if it has printed help.
func parse(args []string, stdout, stderr io.Writer) (*flags, error) {
	var f flags
	parser, err := kong.New(&f, kong.Name("images"), kong.Writers(stdout, stderr),
		kong.Description("Builds Berth's container images as Docker archives."),
		kong.Vars{"arch": runtime.GOARCH, "version": version.Number, "images": strings.Join(imageNames(), ", ")})
	if err != nil {
		return nil, fmt.Errorf("flags: %w", err)
	}
	if _, err := parser.Parse(args); err != nil {
		return nil, err
	}
	var errs []error
	if !versionTag.MatchString(f.Version) {
		errs = append(errs, fmt.Errorf("--version %q: must be an image tag: at most 128 letters, digits, '_', '.' and '-'", f.Version))
	}
	if len(f.Images) == 0 {
		f.Images = imageNames()
		if f.OCI {
			f.Images = slices.DeleteFunc(f.Images, func(name string) bool { return name == envoyImage })
		}
	}
	for _, name := range f.Images {
		if !slices.Contains(imageNames(), name) {
			errs = append(errs, fmt.Errorf("there is no image %q; there are: %s", name, strings.Join(imageNames(), ", ")))
		}
	}
	if slices.Contains(f.Images, envoyImage) && f.OCI {
		errs = append(errs, errors.New("--oci: the envoy image is for tests of this machine; name the other images"))
	}
	if slices.Contains(f.Images, envoyImage) && f.Arch != runtime.GOARCH {
		errs = append(errs, fmt.Errorf("--arch %s: the Envoy of this machine is for %s; name the other images", f.Arch,
			runtime.GOARCH))
	}
	return &f, errors.Join(errs...)
}
