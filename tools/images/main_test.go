package main

import (
	"bytes"
	"crypto/x509"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWrongFlagsAreRefusedBeforeAnythingIsBuilt(t *testing.T) {
	foreign := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	for says, args := range map[string][]string{
		"--version":            {"--version=a/b"},
		"-X":                   {"--version=1 -X main.other=2"},
		"there is no image":    {"envoi"},
		"name the other image": {"--arch=" + foreign},
		"--arch":               {"--arch=sparc"},
	} {
		output := filepath.Join(t.TempDir(), "out")
		err := run(t.Context(), append(args, "--output="+output), io.Discard, io.Discard)
		require.ErrorContains(t, err, says)
		require.NoDirExists(t, output)
	}
}

// What the images are for: their programs run as the user they name, with
// nothing there but what is in the image, and print the version.
func TestProgramsRunInTheirImages(t *testing.T) {
	if testing.Short() {
		t.Skip("builds all programs and fetches Envoy")
	}
	output := t.TempDir()
	var stdout bytes.Buffer
	require.NoError(t, run(t.Context(), []string{"--source=../..", "--version=1.2.3-test", "--output=" + output},
		&stdout, os.Stderr))
	for image, prints := range map[string]map[string]string{
		"allocator":    {"allocator --version": "1.2.3-test\n", "berth version": "1.2.3-test\n"},
		"router":       {"extproc --version": "1.2.3-test\n", "berth version": "1.2.3-test\n"},
		"agent":        {"agent --help": "Usage: berth-agent"},
		"demo-sandbox": {"demo-sandbox --help": "Usage: demo-sandbox"},
		"envoy":        {"envoy --version": "envoy  version: "},
	} {
		t.Run(image, func(t *testing.T) {
			file := filepath.Join(output, image+".tar")
			opened, err := tarball.ImageFromPath(file, nil)
			require.NoError(t, err)
			id, err := opened.ConfigName()
			require.NoError(t, err)
			require.Contains(t, stdout.String(), id.String(), "the printed ID is the one that a runtime computes")
			root := unpack(t, opened)
			for command, want := range prints {
				require.Contains(t, runIn(t, root, strings.Fields(command)...), want)
			}
			if image == envoyImage {
				values, err := os.ReadFile("../../charts/berth/values.yaml")
				require.NoError(t, err)
				require.Contains(t, string(values), "\n  caFile: "+caFile+"\n", "egress.caFile")
				authorities, err := os.ReadFile(filepath.Join(root, caFile))
				require.NoError(t, err)
				require.True(t, x509.NewCertPool().AppendCertsFromPEM(authorities))
			}
		})
	}
}

// The digest must not depend on where the source lies or on the user's settings.
func TestAnotherCheckoutMakesTheSameArchive(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the Go toolchain")
	}
	elsewhere := t.TempDir()
	for _, part := range []string{"go.mod", "go.sum", "cmd/demo-sandbox", "internal/bootclock", "internal/wait"} {
		copyTree(t, filepath.Join("../..", part), filepath.Join(elsewhere, part))
	}
	build := func(source string) []byte {
		output := t.TempDir()
		require.NoError(t, run(t.Context(), []string{"--source=" + source, "--output=" + output, "demo-sandbox"},
			io.Discard, os.Stderr))
		archive, err := os.ReadFile(filepath.Join(output, "demo-sandbox.tar"))
		require.NoError(t, err)
		return archive
	}
	here := build("../..")
	t.Setenv("GOFLAGS", "-tags=netgo,other")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("TMPDIR", t.TempDir())
	require.True(t, bytes.Equal(here, build(elsewhere)), "archives differ")
}

func copyTree(t *testing.T, from, to string) {
	info, err := os.Stat(from)
	require.NoError(t, err)
	if info.IsDir() {
		require.NoError(t, os.CopyFS(to, os.DirFS(from)))
		return
	}
	raw, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, raw, 0o644))
}

// unpack writes the files of an image to a directory.
func unpack(t *testing.T, image v1.Image) string {
	root := t.TempDir()
	for _, e := range entries(t, image) {
		target := filepath.Join(root, e.Name)
		if strings.HasSuffix(e.Name, "/") {
			require.NoError(t, os.MkdirAll(target, 0o755))
			continue
		}
		require.NoError(t, os.WriteFile(target, e.content, e.FileInfo().Mode()))
	}
	return root
}

// runIn runs a command of /usr/local/bin as the image's user, with root as the
// root directory, and returns what it prints.
func runIn(t *testing.T, root string, command ...string) string {
	const nobody = 65532
	cmd := exec.CommandContext(t.Context(), filepath.Join("/usr/local/bin", command[0]), command[1:]...)
	cmd.Err = nil // it is there once the root is changed
	cmd.Dir, cmd.Env = "/", []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	} else {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: nobody, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: nobody, HostID: os.Getegid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	if os.Geteuid() != 0 && (errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) ||
		errors.Is(err, syscall.EINVAL)) {
		t.Skip("only root may change the root directory of a process on this machine:", err)
	}
	require.NoError(t, err, "%v: %s", command, out)
	return string(out)
}
