package devcluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// installLimit bounds an installation. It ends one that hangs: the largest takes a minute, and ten on a busy machine.
const installLimit = 30 * time.Minute

// Packages are releases of other projects, with what they depend on, as the tests use them: from the
// registries, with npm or pip.
type Packages struct {
	name string
	tool string
	// file and content are what the installation reads beside args. file may be "".
	file, content string
	// command returns the command that fills the directory out.
	command func(ctx context.Context, out string) (*exec.Cmd, error)
}

// NPM returns a package with that exact version. Dir is the parent of its node_modules.
func NPM(name, version string) Packages {
	spec := name + "@" + version
	return Packages{name: "npm-" + fileName(spec), tool: "npm", command: npmInstall(spec)}
}

// NPMProject returns the packages that a package.json asks for. Dir is the parent of their node_modules.
func NPMProject(name, packageJSON string) Packages {
	p := Packages{name: "npm-" + fileName(name), tool: "npm", file: "package.json", content: packageJSON}
	p.command = npmInstall()
	return p
}

// PyPI returns a package with that exact version. Dir is a directory for PYTHONPATH.
func PyPI(name, version string) Packages {
	spec := name + "==" + version
	return Packages{name: "pypi-" + fileName(spec), tool: "python3 -m pip", command: pipInstall(spec)}
}

// PyPIProject returns the packages that a requirements.txt asks for. Dir is a directory for PYTHONPATH.
func PyPIProject(name, requirements string) Packages {
	p := Packages{name: "pypi-" + fileName(name), tool: "python3 -m pip", file: "requirements.txt", content: requirements}
	p.command = func(ctx context.Context, out string) (*exec.Cmd, error) {
		return pipInstall("--requirement", filepath.Join(out, p.file))(ctx, out)
	}
	return p
}

func pipInstall(specs ...string) func(context.Context, string) (*exec.Cmd, error) {
	return func(ctx context.Context, out string) (*exec.Cmd, error) {
		// What is called python3 may be a script of a version manager, which takes a lock of the
		// whole Python installation after each pip. The interpreter itself takes none.
		interpreter, err := exec.CommandContext(ctx, "python3", "-c", "import sys; print(sys.executable)").Output()
		if err != nil {
			return nil, fmt.Errorf("ask python3 for its path: %w", err)
		}
		args := append([]string{"-m", "pip", "install", "--quiet", "--disable-pip-version-check",
			"--root-user-action=ignore", "--target", out}, specs...)
		return exec.Command(strings.TrimSpace(string(interpreter)), args...), nil
	}
}

func npmInstall(specs ...string) func(context.Context, string) (*exec.Cmd, error) {
	return func(_ context.Context, out string) (*exec.Cmd, error) {
		args := append([]string{"install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", out}, specs...)
		return exec.Command("npm", args...), nil
	}
}

func fileName(spec string) string {
	return strings.Map(func(r rune) rune {
		if r == '/' || r == '@' || r == '=' {
			return '-'
		}
		return r
	}, spec)
}

// Dir returns the directory with the packages. It installs them into the cache if they are missing
// there. Of concurrent callers and processes only one does so. Lines are written to progress, which
// may be nil, meanwhile.
func (p Packages) Dir(ctx context.Context, progress io.Writer) (string, error) {
	if progress == nil {
		progress = io.Discard
	}
	dir, err := p.artifact(progress).get(ctx, progress)
	if err != nil {
		return "", fmt.Errorf("install %s: %w\n(%s must be on PATH and reach its registry; then run this again: "+
			"nothing is left of the attempt)", p.name, err, p.tool)
	}
	return dir, nil
}

func (p Packages) artifact(progress io.Writer) artifact {
	return artifact{
		name:   p.name,
		recipe: []string{p.name, p.file, p.content},
		make: func(ctx context.Context, sup *proc.Supervisor, out, _ string) error {
			ctx, cancel := context.WithTimeoutCause(ctx, installLimit, fmt.Errorf("not done after %v", installLimit))
			defer cancel()
			if p.file != "" {
				if err := os.WriteFile(filepath.Join(out, p.file), []byte(p.content), 0o600); err != nil {
					return err
				}
			}
			cmd, err := p.command(ctx, out)
			if err != nil {
				return err
			}
			return run(ctx, sup, cmd, progress, "installing "+p.name)
		},
	}
}
