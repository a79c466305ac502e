package devcluster

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// actEnv makes the test binary act as another process of a test; its value is
// one of the keys of acts.
const actEnv = "BERTH_DEVCLUSTER_TEST_ACT"

func TestMain(m *testing.M) {
	acts := map[string]func() error{"own": actOwn, "cluster": actCluster, "build": actBuild}
	if act := os.Getenv(actEnv); act != "" {
		if err := acts[act](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}
