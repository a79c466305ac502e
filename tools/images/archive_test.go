package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/require"
)

type entry struct {
	tar.Header
	content []byte
}

// entries returns what is in the image's layers, in their order.
func entries(t *testing.T, image v1.Image) []entry {
	layers, err := image.Layers()
	require.NoError(t, err)
	var all []entry
	for _, layer := range layers {
		r, err := layer.Uncompressed()
		require.NoError(t, err)
		defer r.Close()
		for tr := tar.NewReader(r); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			content, err := io.ReadAll(tr)
			require.NoError(t, err)
			all = append(all, entry{*h, content})
		}
	}
	return all
}

// fakeProgram returns an ELF file that cannot run.
func fakeProgram(machine elf.Machine, dynamic bool) []byte {
	program := elf.Prog64{Type: uint32(elf.PT_LOAD)}
	if dynamic {
		program.Type = uint32(elf.PT_INTERP)
	}
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_DYN), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
		Ehsize: 64, Phoff: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	var b bytes.Buffer
	_ = binary.Write(&b, binary.LittleEndian, header) // a buffer takes everything
	_ = binary.Write(&b, binary.LittleEndian, program)
	return b.Bytes()
}

// router is the spec of an image with small programs, in a directory of its own.
func router(t *testing.T, version, programs string) spec {
	s := spec{
		recipe: recipes()["router"], name: "router", version: version, arch: "amd64",
		files: map[string]string{}, layerType: types.DockerUncompressedLayer,
	}
	for _, name := range s.programs {
		s.files[name] = filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(s.files[name], append(fakeProgram(elf.EM_X86_64, false), name+programs...), 0o700))
	}
	return s
}

func archive(t *testing.T, s spec) (raw []byte, id string) {
	built, err := s.build()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "image.tar")
	size, err := writeArchive(file, s.reference(), built)
	require.NoError(t, err)
	raw, err = os.ReadFile(file)
	require.NoError(t, err)
	require.EqualValues(t, len(raw), size)
	name, err := built.ConfigName()
	require.NoError(t, err)
	return raw, name.String()
}

func TestSameInputsMakeTheSameArchive(t *testing.T) {
	s := router(t, "1.0", "")
	first, id := archive(t, s)
	for _, file := range s.files { // what a file is besides its content is no input
		require.NoError(t, os.Chmod(file, 0o400))
		require.NoError(t, os.Chtimes(file, time.Now(), time.Now().Add(-time.Hour)))
	}
	again, idAgain := archive(t, s)
	require.True(t, bytes.Equal(first, again))
	require.Equal(t, id, idAgain)
	elsewhere, idElsewhere := archive(t, router(t, "1.0", ""))
	require.True(t, bytes.Equal(first, elsewhere))
	require.Equal(t, id, idElsewhere)

	_, other := archive(t, router(t, "1.1", ""))
	require.NotEqual(t, id, other, "another version")
	_, other = archive(t, router(t, "1.0", "changed"))
	require.NotEqual(t, id, other, "other programs")
}

func TestImageHoldsExactlyItsRecipe(t *testing.T) {
	raw, id := archive(t, router(t, "1.0", ""))
	file := filepath.Join(t.TempDir(), "router.tar")
	require.NoError(t, os.WriteFile(file, raw, 0o600))
	image, err := tarball.ImageFromPath(file, nil)
	require.NoError(t, err)

	config, err := image.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "amd64", config.Architecture)
	require.Equal(t, "linux", config.OS)
	require.Equal(t, "65532:65532", config.Config.User)
	require.Equal(t, []string{"PATH=/usr/local/bin"}, config.Config.Env)
	require.Equal(t, []string{"/usr/local/bin/extproc"}, config.Config.Entrypoint)
	require.Empty(t, config.Config.Cmd)
	require.Equal(t, map[string]string{
		"org.opencontainers.image.title":    "Berth's router",
		"org.opencontainers.image.version":  "1.0",
		"org.opencontainers.image.source":   "https://github.com/berth-sandbox/berth",
		"org.opencontainers.image.licenses": "Apache-2.0",
	}, config.Config.Labels)

	type seen struct {
		name string
		mode int64
	}
	var all []seen
	for _, e := range entries(t, image) {
		all = append(all, seen{e.Name, e.Mode})
		require.Contains(t, []byte{tar.TypeReg, tar.TypeDir}, e.Typeflag, e.Name)
		require.Zero(t, e.Uid, e.Name)
		require.Zero(t, e.Gid, e.Name)
		require.Empty(t, e.Uname+e.Gname, e.Name)
		require.Zero(t, e.ModTime.Unix(), e.Name)
		if e.Name == "etc/passwd" {
			require.Contains(t, string(e.content), ":65532:65532:")
		}
	}
	require.Equal(t, []seen{
		{"etc/", 0o755}, {"etc/group", 0o644}, {"etc/passwd", 0o644},
		{"usr/", 0o755}, {"usr/local/", 0o755}, {"usr/local/bin/", 0o755}, {"usr/local/bin/berth", 0o755},
		{"usr/", 0o755}, {"usr/local/", 0o755}, {"usr/local/bin/", 0o755}, {"usr/local/bin/extproc", 0o755},
	}, all)

	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(file) })
	require.NoError(t, err)
	require.Len(t, manifest, 1)
	require.Equal(t, []string{"berth/router:1.0"}, manifest[0].RepoTags)
	require.Equal(t, id, manifest[0].Config)
}

func TestImagesShareTheLayersOfWhatTheyShare(t *testing.T) {
	s := router(t, "1.0", "")
	s.files["allocator"] = s.files["extproc"]
	other := s
	other.recipe, other.name = recipes()["allocator"], "allocator"
	var digests [2][]v1.Hash
	for i, s := range []spec{s, other} {
		image, err := s.build()
		require.NoError(t, err)
		manifest, err := image.Manifest()
		require.NoError(t, err)
		for _, layer := range manifest.Layers {
			digests[i] = append(digests[i], layer.Digest)
		}
		require.Len(t, digests[i], 3)
	}
	require.Equal(t, digests[0][:2], digests[1][:2])
	require.NotEqual(t, digests[0][2], digests[1][2])
}

func TestProgramOfAnotherArchitectureIsRefused(t *testing.T) {
	s := router(t, "1.0", "")
	s.arch = "arm64"
	_, err := s.build()
	require.ErrorContains(t, err, "not for arm64")
}

func TestOurProgramsMustBeStatic(t *testing.T) {
	s := router(t, "1.0", "")
	require.NoError(t, os.WriteFile(s.files["berth"], fakeProgram(elf.EM_X86_64, true), 0o700))
	_, err := s.build()
	require.ErrorContains(t, err, "berth is not static")
}

func TestFailedWriteLeavesTheOldArchive(t *testing.T) {
	file := filepath.Join(t.TempDir(), "image.tar")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	built, err := router(t, "1.0", "").build()
	require.NoError(t, err)
	_, err = writeArchive(file, "not a reference", built)
	require.Error(t, err)
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "old", string(raw))
	left, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, left, 1)
}

func TestOCIArchiveHasAnImageForEachArchitecture(t *testing.T) {
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	write := func() (file string, digest v1.Hash) {
		var built []v1.Image
		for _, arch := range []string{"amd64", "arm64"} {
			s := router(t, "1.0", "")
			s.arch, s.layerType = arch, types.OCILayer
			for _, file := range s.files {
				require.NoError(t, os.WriteFile(file, fakeProgram(machine[arch], false), 0o700))
			}
			image, err := s.build()
			require.NoError(t, err)
			built = append(built, image)
		}
		index, err := ociIndex(built)
		require.NoError(t, err)
		file = filepath.Join(t.TempDir(), "router.tar")
		size, err := writeOCI(file, "1.0", index)
		require.NoError(t, err)
		info, err := os.Stat(file)
		require.NoError(t, err)
		require.Equal(t, info.Size(), size)
		digest, err = index.Digest()
		require.NoError(t, err)
		return file, digest
	}
	file, digest := write()
	again, digestAgain := write()
	require.Equal(t, digest, digestAgain)
	first, err := os.ReadFile(file)
	require.NoError(t, err)
	second, err := os.ReadFile(again)
	require.NoError(t, err)
	require.True(t, bytes.Equal(first, second))

	tree := t.TempDir()
	for tr := tar.NewReader(bytes.NewReader(first)); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		content, err := io.ReadAll(tr)
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(filepath.Join(tree, filepath.Dir(h.Name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(tree, h.Name), content, 0o600))
	}
	root, err := layout.ImageIndexFromPath(tree)
	require.NoError(t, err)
	require.NoError(t, validate.Index(root))
	index, err := root.ImageIndex(digest)
	require.NoError(t, err)
	manifest, err := index.IndexManifest()
	require.NoError(t, err)
	require.Equal(t, types.OCIImageIndex, manifest.MediaType)
	var platforms []string
	for _, image := range manifest.Manifests {
		require.Equal(t, types.OCIManifestSchema1, image.MediaType)
		platforms = append(platforms, image.Platform.String())
	}
	require.Equal(t, []string{"linux/amd64", "linux/arm64"}, platforms)
}
