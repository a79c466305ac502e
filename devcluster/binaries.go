package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/tools"
)

// The versions that are built. tools/kube.mod requires the same.
const (
	kubeVersion = "v1.36.3"
	etcdVersion = "v3.6.8"
)

// oldestKubeMinor is the oldest Kubernetes 1.x taken from PATH.
const oldestKubeMinor = 30

const versionLimit = 30 * time.Second

// ControlPlaneBinaries returns the paths of etcd and kube-apiserver: both from
// $KUBEBUILDER_ASSETS, else both from PATH, else both from the cache, where
// they are built from pinned Go modules when missing.
func ControlPlaneBinaries(ctx context.Context, progress io.Writer) (etcd, apiServer string, err error) {
	if progress == nil {
		progress = io.Discard
	}
	if dir := os.Getenv("KUBEBUILDER_ASSETS"); dir != "" {
		etcd, apiServer = filepath.Join(dir, "etcd"), filepath.Join(dir, "kube-apiserver")
		for _, bin := range []string{etcd, apiServer} {
			if _, err := exec.LookPath(bin); err != nil {
				return "", "", fmt.Errorf("KUBEBUILDER_ASSETS: %w; unset it or name a directory with etcd and kube-apiserver", err)
			}
		}
		return etcd, apiServer, nil
	}
	if etcd, apiServer, err = controlPlaneOnPath(ctx, progress); err != nil || etcd != "" {
		return etcd, apiServer, err
	}
	dir, err := kubeArtifact(progress).get(ctx, progress)
	if err != nil {
		return "", "", fmt.Errorf("build etcd and kube-apiserver: %w\n"+
			"(a directory with both, named by KUBEBUILDER_ASSETS, makes building needless)", err)
	}
	return filepath.Join(dir, "etcd"), filepath.Join(dir, "kube-apiserver"), nil
}

// controlPlaneOnPath returns empty paths when PATH does not have both, or has a
// kube-apiserver that is too old.
func controlPlaneOnPath(ctx context.Context, progress io.Writer) (etcd, apiServer string, err error) {
	etcd, etcdErr := exec.LookPath("etcd")
	apiServer, apiErr := exec.LookPath("kube-apiserver")
	if etcdErr != nil || apiErr != nil {
		return "", "", nil
	}
	version, err := versionOf(ctx, apiServer)
	if err != nil && ctx.Err() != nil {
		return "", "", err
	}
	if err != nil || !kubeVersionServes(version) {
		if err != nil {
			version = err.Error()
		}
		fmt.Fprintf(progress, "devcluster: %s is ignored, it is not Kubernetes 1.%d or newer: %s\n", apiServer,
			oldestKubeMinor, version)
		return "", "", nil
	}
	return etcd, apiServer, nil
}

var kubeVersionLine = regexp.MustCompile(`^Kubernetes v1\.(\d+)\.`)

func kubeVersionServes(line string) bool {
	m := kubeVersionLine.FindStringSubmatch(line)
	if m == nil {
		return false
	}
	minor, err := strconv.Atoi(m[1])
	return err == nil && minor >= oldestKubeMinor
}

// kubeArtifact builds etcd and kube-apiserver from the module in tools.
func kubeArtifact(progress io.Writer) artifact {
	const pkg = "k8s.io/component-base/version."
	v := strings.SplitN(strings.TrimPrefix(kubeVersion, "v"), ".", 3)
	b := goBuild{
		what: "kube-apiserver " + kubeVersion + " and etcd " + etcdVersion,
		took: "3 to 6 minutes",
		mod:  tools.KubeMod, sum: tools.KubeSum,
		// Without these flags the API server reports v0.0.0-master, and clients that
		// check its version refuse it.
		ldflags: "-s -w -X " + pkg + "gitVersion=" + kubeVersion + " -X " + pkg + "gitMajor=" + v[0] +
			" -X " + pkg + "gitMinor=" + v[1] + " -X " + pkg + "gitTreeState=clean",
		packages: []string{"k8s.io/kubernetes/cmd/kube-apiserver", "go.etcd.io/etcd/server/v3"},
	}
	return artifact{
		name:   "kubernetes-" + kubeVersion,
		recipe: b.recipe(),
		make: func(ctx context.Context, sup *proc.Supervisor, out, scratch string) error {
			if err := b.run(ctx, sup, progress, out, scratch); err != nil {
				return err
			}
			return os.Rename(filepath.Join(out, "server"), filepath.Join(out, "etcd"))
		},
	}
}

// versionOf returns what bin prints for --version, trimmed.
func versionOf(ctx context.Context, bin string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, tail(exit.Stderr))
		}
		return "", fmt.Errorf("%s --version: %w", bin, err)
	}
	return strings.TrimSpace(string(out)), nil
}
