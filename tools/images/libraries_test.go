package main

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
)

// A program of this machine runs with only what was found. The machine's own loader decides.
func TestDynamicProgramRunsWithWhatWasFound(t *testing.T) {
	if _, ok := machines[runtime.GOARCH]; !ok {
		t.Skip("images are not made for this architecture")
	}
	const program = "/bin/sh"
	if _, dynamic, err := readProgram(program); err != nil || !dynamic {
		t.Skipf("%s is not a dynamic program here: %v", program, err)
	}
	image, err := spec{
		recipe: recipes()[envoyImage], name: envoyImage, version: "0", arch: runtime.GOARCH,
		files: map[string]string{"envoy": program}, layerType: types.DockerUncompressedLayer,
	}.build()
	require.NoError(t, err)
	require.Equal(t, "it runs\n", runIn(t, unpack(t, image), "envoy", "-c", "echo it runs"))
}

func TestScriptIsRefusedAsAProgram(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\nexec envoy\n"), 0o755))
	_, _, err := readProgram(script)
	require.ErrorContains(t, err, "not an ELF file")
}
