package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing/fstest"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// epoch is the time of everything in an image. The time of building is not an input.
var epoch = time.Unix(0, 0).UTC()

// files are files of an image by path, without the leading slash. They belong to root, so
// that the user that the programs run as cannot change them.
type files map[string]*fstest.MapFile

func (l files) add(path string, mode fs.FileMode, content []byte) {
	path = strings.TrimPrefix(path, "/")
	l[path] = &fstest.MapFile{Data: content, Mode: mode, ModTime: epoch}
	for dir := filepath.Dir(path); dir != "."; dir = filepath.Dir(dir) {
		l[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755, ModTime: epoch}
	}
}

// layer returns the files and the directories above them as a layer of this type.
func (l files) layer(as types.MediaType) (v1.Layer, error) {
	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	if err := errors.Join(w.AddFS(fstest.MapFS(l)), w.Close()); err != nil {
		return nil, err
	}
	if as == types.DockerUncompressedLayer {
		return static.NewLayer(packed.Bytes(), as), nil
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(as))
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
