package stack

import (
	"context"
	"io"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	codeinterpreter "github.com/berth-sandbox/berth/examples/code-interpreter"
)

// InterpreterPackages are the Python packages that the pods of an InterpreterPool need.
func InterpreterPackages() (devcluster.Packages, error) {
	requirements, err := codeinterpreter.Files.ReadFile("requirements.txt")
	return devcluster.PyPIProject("code-interpreter", string(requirements)), err
}

// InterpreterPool returns the pool of examples/code-interpreter, as pods without an image run it: with this
// machine's Python, the packages in the cache, and the program in dir, which it makes. It writes to progress
// while it installs packages.
func InterpreterPool(ctx context.Context, namespace, dir string, progress io.Writer) (*v1alpha1.SandboxPool, error) {
	packages, err := InterpreterPackages()
	if err != nil {
		return nil, err
	}
	path, err := packages.Dir(ctx, progress)
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(dir, codeinterpreter.Files); err != nil {
		return nil, err
	}
	raw, err := codeinterpreter.Files.ReadFile("pool.yaml")
	if err != nil {
		return nil, err
	}
	var pool v1alpha1.SandboxPool
	if err := yaml.UnmarshalStrict(raw, &pool); err != nil {
		return nil, err
	}
	pool.Namespace = namespace
	pool.Spec.Template.Spec.ServiceAccountName = "" // the chart makes it
	container := &pool.Spec.Template.Spec.Containers[0]
	container.Command = []string{"python3", filepath.Join(dir, "server.py")}
	container.Env = append(container.Env, fromField("HOST", "status.podIP"),
		corev1.EnvVar{Name: "PYTHONPATH", Value: path}, corev1.EnvVar{Name: "PYTHONDONTWRITEBYTECODE", Value: "1"})
	return &pool, nil
}
