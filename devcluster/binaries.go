package devcluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/tools"
)

// The versions that are built. tools/kube.mod requires the same.
const (
	kubeVersion = "v1.36.3"
	etcdVersion = "v3.6.8"
)

// ControlPlaneBinaries returns the paths of etcd and kube-apiserver: both from
// $KUBEBUILDER_ASSETS, else both from the cache, where they are built from pinned Go
// modules when missing. It writes lines to progress, which may be nil, while it builds.
func ControlPlaneBinaries(ctx context.Context, progress io.Writer) (etcd, apiServer string, err error) {
	if progress == nil {
		progress = io.Discard
	}
	dir := os.Getenv("KUBEBUILDER_ASSETS")
	if dir == "" {
		if dir, err = kubeArtifact(progress).get(ctx, progress); err != nil {
			return "", "", fmt.Errorf("build etcd and kube-apiserver: %w\n"+
				"(a directory with both, named by KUBEBUILDER_ASSETS, makes building needless)", err)
		}
	}
	etcd, apiServer = filepath.Join(dir, "etcd"), filepath.Join(dir, "kube-apiserver")
	for _, bin := range []string{etcd, apiServer} {
		if _, err := exec.LookPath(bin); err != nil {
			return "", "", fmt.Errorf("%w; set KUBEBUILDER_ASSETS to a directory with etcd and kube-apiserver, or unset it",
				err)
		}
	}
	return etcd, apiServer, nil
}

// kubeArtifact builds etcd and kube-apiserver from the module in tools, which pins every
// dependency by version and hash.
func kubeArtifact(progress io.Writer) artifact {
	const doing = "building kube-apiserver " + kubeVersion + " and etcd " + etcdVersion + " from source (3 to 6 minutes)"
	const pkg = "k8s.io/component-base/version."
	v := strings.SplitN(strings.TrimPrefix(kubeVersion, "v"), ".", 3)
	// Without these flags the API server reports v0.0.0-master, and clients that check
	// its version refuse it.
	ldflags := "-s -w -X " + pkg + "gitVersion=" + kubeVersion + " -X " + pkg + "gitMajor=" + v[0] +
		" -X " + pkg + "gitMinor=" + v[1] + " -X " + pkg + "gitTreeState=clean"
	args := []string{"build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-tags=grpcnotrace", "-ldflags=" + ldflags}
	packages := []string{"k8s.io/kubernetes/cmd/kube-apiserver", "go.etcd.io/etcd/server/v3"}
	// These override Go settings of the caller's environment. GOFLAGS is not empty,
	// because the go command would then use the one of "go env -w".
	env := []string{"GOFLAGS=-mod=readonly", "GOWORK=off", "CGO_ENABLED=0",
		"GOOS=" + runtime.GOOS, "GOARCH=" + runtime.GOARCH}
	return artifact{
		name: "kubernetes-" + kubeVersion,
		// All input that decides the result, except the version of Go.
		recipe: slices.Concat([]string{string(tools.KubeMod), string(tools.KubeSum)}, env, args, packages),
		make: func(ctx context.Context, sup *proc.Supervisor, out, scratch string) error {
			for name, content := range map[string][]byte{"go.mod": tools.KubeMod, "go.sum": tools.KubeSum} {
				if err := os.WriteFile(filepath.Join(scratch, name), content, 0o644); err != nil {
					return err
				}
			}
			goBin, err := exec.LookPath("go")
			if err != nil {
				return fmt.Errorf("the go command is needed: %w", err)
			}
			cmd := exec.Command(goBin, slices.Concat(args, []string{"-o", out + "/"}, packages)...)
			cmd.Dir = scratch
			// An interrupted build leaves nothing outside scratch.
			cmd.Env = slices.Concat(os.Environ(), env, []string{"GOTMPDIR=" + scratch, "PWD=" + scratch})
			if err := run(ctx, sup, cmd, progress, doing); err != nil {
				return err
			}
			return os.Rename(filepath.Join(out, "server"), filepath.Join(out, "etcd"))
		},
	}
}
