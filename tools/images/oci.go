package main

import (
	"archive/tar"
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// ociIndex returns the images of all architectures under one digest, with the media types of OCI.
func ociIndex(built []v1.Image) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, image := range built {
		config, err := image.ConfigFile()
		if err != nil {
			return nil, err
		}
		image = mutate.ConfigMediaType(mutate.MediaType(image, types.OCIManifestSchema1), types.OCIConfigJSON)
		platform := v1.Descriptor{Platform: config.Platform()}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: platform})
	}
	return index, nil
}

// writeOCI writes an image layout with this index as a tar file, all of it or nothing, and returns the size of
// the file.
func writeOCI(to, version string, index v1.ImageIndex) (size int64, err error) {
	dir, err := os.MkdirTemp(filepath.Dir(to), "."+filepath.Base(to)+"-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	blobs := filepath.Join(dir, "layout")
	at, err := layout.Write(blobs, empty.Index)
	if err != nil {
		return 0, err
	}
	name := map[string]string{"org.opencontainers.image.ref.name": version}
	if err := at.AppendIndex(index, layout.WithAnnotations(name)); err != nil {
		return 0, err
	}
	file, err := os.Create(filepath.Join(dir, "archive"))
	if err != nil {
		return 0, err
	}
	err = writeTree(file, os.DirFS(blobs))
	info, statErr := file.Stat()
	if err := errors.Join(err, statErr, file.Close()); err != nil {
		return 0, err
	}
	return info.Size(), os.Rename(file.Name(), to)
}

// writeTree writes the files of a tree, in the order of their names, as a tar file that says nothing of this machine.
func writeTree(to *os.File, tree fs.FS) error {
	w := tar.NewWriter(to)
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		if err != nil {
			return err
		}
		header := &tar.Header{Name: path, Mode: 0o644, Size: int64(len(content)), ModTime: epoch, Format: tar.FormatUSTAR}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	return cmp.Or(err, w.Close())
}
