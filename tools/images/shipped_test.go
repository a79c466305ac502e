package main

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// shippedPrograms are the programs of the images, sorted. Envoy is not Berth's own.
func shippedPrograms() []string {
	programs := map[string]bool{}
	for name, r := range recipes() {
		if name == envoyImage {
			continue
		}
		for _, program := range r.programs {
			programs[program] = true
		}
	}
	return slices.Sorted(maps.Keys(programs))
}

func TestShippedProgramsLinkNoTestCode(t *testing.T) {
	for _, program := range shippedPrograms() {
		linked, err := exec.Command("go", "list", "-deps", "../../cmd/"+program).Output()
		require.NoError(t, err, program)
		require.Contains(t, string(linked), "github.com/berth-sandbox/berth/cmd/"+program+"\n")
		for p := range strings.Lines(string(linked)) {
			p = strings.TrimSpace(p)
			require.False(t, testCode(p), "%s links %s", program, p)
		}
	}
}

// testCode reports whether a package is only for tests and development.
func testCode(pkg string) bool {
	for _, root := range []string{"testing", "github.com/berth-sandbox/berth/devcluster",
		"github.com/berth-sandbox/berth/e2e",
		"github.com/berth-sandbox/berth/tools", "github.com/stretchr/testify"} {
		if pkg == root || strings.HasPrefix(pkg, root+"/") {
			return true
		}
	}
	return false
}

// The negative control of TestShippedProgramsLinkNoTestCode.
func TestBerthDevWouldBeRefused(t *testing.T) {
	linked, err := exec.Command("go", "list", "-deps", "../../cmd/berth-dev").Output()
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(strings.Fields(string(linked)), testCode))
	require.NotContains(t, shippedPrograms(), "berth-dev")
}
