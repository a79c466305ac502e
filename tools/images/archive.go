package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// file is a file of an image. It belongs to root, so that the user that the
// programs run as cannot change it.
type file struct {
	path    string // absolute
	mode    int64
	content []byte
}

type layer struct {
	what  string
	files []file
}

// pack makes the layer's tar: the files and the directories above them, sorted,
// with nothing in it of the machine or the moment.
func (l layer) pack() (v1.Layer, error) {
	entries := make(map[string]*file) // nil: a directory
	for _, f := range l.files {
		if !path.IsAbs(f.path) || path.Clean(f.path) != f.path {
			return nil, fmt.Errorf("%q is no absolute, clean path", f.path)
		}
		if _, taken := entries[f.path]; taken {
			return nil, fmt.Errorf("%s is in it twice", f.path)
		}
		entries[f.path] = &f
	}
	for _, f := range l.files {
		for dir := path.Dir(f.path); dir != "/"; dir = path.Dir(dir) {
			if entries[dir] != nil {
				return nil, fmt.Errorf("%s is a file and a directory", dir)
			}
			entries[dir] = nil
		}
	}
	paths := make([]string, 0, len(entries))
	for p := range entries {
		paths = append(paths, p)
	}
	slices.Sort(paths) // a directory before what is in it

	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	for _, p := range paths {
		h := &tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(p, "/") + "/", Mode: 0o755, ModTime: time.Unix(0, 0)}
		f := entries[p]
		if f != nil {
			h.Typeflag, h.Name, h.Mode, h.Size = tar.TypeReg, strings.TrimPrefix(p, "/"), f.mode, int64(len(f.content))
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if f == nil {
			continue
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return static.NewLayer(packed.Bytes(), types.DockerUncompressedLayer), nil
}

// writeArchive writes the image as a Docker archive, all of it or nothing, and
// returns the archive's size.
func writeArchive(to, reference string, built v1.Image) (int64, error) {
	tag, err := name.NewTag(reference)
	if err != nil {
		return 0, err
	}
	w, err := os.CreateTemp(filepath.Dir(to), "."+filepath.Base(to)+"-")
	if err != nil {
		return 0, err
	}
	defer os.Remove(w.Name()) // fails once it has its name
	defer w.Close()
	if err := tarball.Write(tag, built, w); err != nil {
		return 0, err
	}
	info, err := w.Stat()
	if err != nil {
		return 0, err
	}
	if err := w.Chmod(0o644); err != nil {
		return 0, err
	}
	if err := w.Close(); err != nil {
		return 0, err
	}
	return info.Size(), os.Rename(w.Name(), to)
}
