package e2e

import (
	"slices"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// toolSDKs use commands, files, watches, terminals and git.
var toolSDKs = []stockSDK{
	{"2.51.0", npm, []string{"node", "tools.cjs"}},
	{"2.63.0", pip, []string{"python3", "tools.py", "sync"}},
	{"2.63.0", pip, []string{"python3", "tools.py", "async"}},
}

func TestStockSDKsUseTheAgent(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	e.useTools("", e.overHTTP())
}

// useTools runs a part of the programs with toolSDKs side by side, on a pool with agents. "" is all of them.
func (e *env) useTools(part string, environment []string) {
	e.t.Helper()
	pool := e.otherPool("tools", int32(len(toolSDKs)), func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true}
	})
	e.t.Run("tools", func(t *testing.T) {
		for _, c := range toolSDKs {
			dir := c.installed(t)
			t.Run(strings.Join(c.program, " "), func(t *testing.T) {
				t.Parallel()
				c.run(t, dir, part, append(slices.Clip(environment), "POOL="+pool, "DIR="+t.TempDir()))
			})
		}
	})
}
