package chaos

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 1
	}
	if !testing.Short() {
		dir, err := os.MkdirTemp("", "berth-chaos-bin-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = build(dir)
		}
		if err != nil {
			return fail(fmt.Errorf("build the programs under test: %w", err))
		}
		binDir = dir
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return fail(err)
		}
	}
	return code
}

// build builds the programs under test, with the race detector when the tests
// have it.
func build(dir string) error {
	args := []string{"build", "-o", dir + "/"}
	if raceEnabled {
		args = append(args, "-race")
	}
	for _, program := range []string{"allocator", "extproc"} {
		args = append(args, "github.com/berth-sandbox/berth/cmd/"+program)
	}
	out, err := exec.Command("go", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
