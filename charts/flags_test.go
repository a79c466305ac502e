package charts

import (
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

// help returns what a program says about its flags.
func help(t *testing.T, command ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", slices.Concat([]string{"run", "-trimpath", "../cmd/" + command[0]}, command[1:], []string{"--help"})...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as make build does: then nothing is compiled twice
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

func TestProgramsKnowTheFlagsTheyAreGiven(t *testing.T) {
	// used are the flags in any rendering, by program.
	used := map[string]map[string]string{"allocator": {}, "extproc": {}, "berth envoy-config": {}, "berth envoy-egress-config": {}, "berth envoy-drain": {}, "berth certs ensure": {}, "berth mcp": {}, "berth check": {}}
	for _, values := range valueFiles() {
		all := render(t, values)
		gateway := findWorkload(t, all, "berth-gateway")
		maps.Copy(used["allocator"], flagsOf(findWorkload(t, all, "berth-allocator").container(t, "allocator")))
		maps.Copy(used["extproc"], flagsOf(gateway.container(t, "router")))
		maps.Copy(used["berth envoy-config"], flagsOf(gateway.container(t, "config")))
		drain := gateway.container(t, "router").Lifecycle.PreStop.Exec.Command
		maps.Copy(used["berth envoy-drain"], flagsOf(corev1.Container{Args: drain[2:]}))
		for _, w := range workloads(all) {
			switch w.name {
			case "berth-egress":
				maps.Copy(used["extproc"], flagsOf(w.container(t, "router")))
				maps.Copy(used["berth envoy-egress-config"], flagsOf(w.container(t, "config")))
			case "berth-mcp":
				maps.Copy(used["berth mcp"], flagsOf(w.container(t, "mcp")))
			case "berth-control-tls":
				maps.Copy(used["berth certs ensure"], flagsOf(w.container(t, "certs")))
			case "berth-test":
				maps.Copy(used["berth check"], flagsOf(w.container(t, "check")))
			}
		}
	}
	for program, flags := range used {
		require.NotEmpty(t, flags, program)
		known := help(t, strings.Fields(program)...)
		for name := range flags {
			require.Regexp(t, `--`+regexp.QuoteMeta(name)+`[ =,\n]`, known, "%s does not know --%s", program, name)
		}
	}
}
