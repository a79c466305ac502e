package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"

	"github.com/berth-sandbox/berth/devcluster"
)

// versionVariable is where the programs find the version that they print. The
// linker does not complain when there is no such variable; a test does.
const versionVariable = "github.com/berth-sandbox/berth/cmd/internal/cli.release"

// linkerFlags leave out the symbol table, the debugger's data and the build ID.
func linkerFlags(version string) string {
	return "-s -w -buildid= -X " + versionVariable + "=" + version
}

// buildPrograms builds Berth's programs into the directory out, static and with
// nothing in them of the machine: what a person's Go settings would change in
// the result is overridden.
func buildPrograms(ctx context.Context, f *flags, arch string, programs []string, out string, stderr io.Writer) error {
	args := []string{"build", "-ldflags", linkerFlags(f.Version), "-o", out + "/"}
	for _, program := range programs {
		args = append(args, "./cmd/"+program)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = f.Source
	cmd.Stdout, cmd.Stderr = stderr, stderr
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0",
		"GOEXPERIMENT=", "GOFIPS140=off", "GOWORK=off", "GOFLAGS=-trimpath -buildvcs=false")
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build Berth's programs in %s: %w", f.Source, err)
	}
	return nil
}

// envoyVersionLine matches "envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL".
var envoyVersionLine = regexp.MustCompile(`  version: [^/]+/([^/]+)/`)

// findEnvoy returns this machine's Envoy and the version that it says it is.
func findEnvoy(ctx context.Context, stderr io.Writer) (binary, version string, err error) {
	if binary, err = devcluster.EnvoyBinary(ctx, stderr); err != nil {
		return "", "", err
	}
	said, err := exec.CommandContext(ctx, binary, "--version").Output()
	if err != nil {
		return "", "", fmt.Errorf("%s --version: %w", binary, err)
	}
	found := envoyVersionLine.FindSubmatch(said)
	if found == nil {
		return "", "", fmt.Errorf("%s --version does not say a version: %q", binary, said)
	}
	return binary, string(found[1]), nil
}
