package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// asProgram makes the test binary the program berth, for tests that need a process.
const asProgram = "BERTH_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

// noon is the time of the commands under test.
var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// command runs the command with these arguments.
func command(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	var c commands
	var out, errs bytes.Buffer
	k, err := cli.Parse(&c, "berth", "", "", args, &out, &errs)
	if err == nil {
		k.BindTo(ctx, (*context.Context)(nil))
		err = k.Run(newOutput(&out, &errs, func() time.Time { return noon }))
	}
	return out.String(), errs.String(), err
}

// berth runs a command that writes nothing to stderr.
func berth(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	stdout, stderr, err := command(t.Context(), args...)
	require.Empty(t, stderr)
	return stdout, err
}

// program returns a directory with an executable berth.
func program(t *testing.T) (dir string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	dir = t.TempDir()
	script := "#!/bin/sh\n" + asProgram + "=1 exec " + self + " \"$@\"\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "berth"), []byte(script), 0o755))
	return dir
}

// isolate keeps contexts and the environment of the machine out of a test.
func isolate(t *testing.T) (config string) {
	t.Helper()
	config = filepath.Join(t.TempDir(), "config.yaml")
	t.Setenv("BERTH_CACHE", t.TempDir())
	t.Setenv("BERTH_CONFIG", config)
	for _, name := range []string{"BERTH_API_URL", "BERTH_API_KEY", "BERTH_API_KEY_FILE", "BERTH_CONTEXT", "BERTH_CA_FILE", "BERTH_GATEWAY"} {
		t.Setenv(name, "")
	}
	return config
}

func updating() bool { return flag.Lookup("update").Value.String() == "true" }

// golden compares text with a file in testdata, or writes the file if the test runs with -update.
func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if updating() {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run make golden")
	require.Equal(t, string(want), text, "%s is stale, or the command is wrong; make golden writes it", path)
}

func TestVersionIsPrintedByFlagAndCommand(t *testing.T) {
	stdout, err := berth(t, "version")
	require.NoError(t, err)
	require.Equal(t, cli.Version()+"\n", stdout)
	var out bytes.Buffer
	require.ErrorIs(t, run(t.Context(), []string{"help", "ls"}, &out, &out), cli.ErrHelp)
	require.Contains(t, out.String(), "Usage: berth ls")
	var alone bytes.Buffer
	require.ErrorIs(t, run(t.Context(), nil, &alone, &alone), cli.ErrHelp)
	require.Contains(t, alone.String(), "Usage: berth <command>")
	stdout, err = berth(t, "--version")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Equal(t, cli.Version()+"\n", stdout)
}

// A terminal of 80 columns shows the help of every command without breaking lines.
func TestHelpFitsEightyColumnsAndIsTheGoldenFile(t *testing.T) {
	t.Setenv("COLUMNS", "80")
	parser, err := kong.New(new(commands), kong.Name("berth"), kong.Vars{"version": ""})
	require.NoError(t, err)
	var all strings.Builder
	require.NoError(t, kong.Visit(parser.Model, func(at kong.Visitable, next kong.Next) error {
		node, ok := at.(*kong.Node)
		if app, is := at.(*kong.Application); is {
			node, ok = app.Node, true
		}
		if ok && !node.Hidden {
			args := slices.Concat(strings.Fields(node.FullPath())[1:], []string{"--help"})
			stdout, err := berth(t, args...)
			require.ErrorIs(t, err, cli.ErrHelp)
			for line := range strings.Lines(stdout) {
				require.LessOrEqual(t, len(strings.TrimSuffix(line, "\n")), 80, "%v: %s", args, line)
			}
			if len(args) == 1 {
				all.WriteString(stdout)
			}
		}
		return next(nil)
	}))
	golden(t, "help", all.String())
}

func TestEveryFlagOfTheEnvironmentHasOneMeaning(t *testing.T) {
	parser, err := kong.New(new(commands), kong.Name("berth"), kong.Vars{"version": ""})
	require.NoError(t, err)
	flags := map[string]string{}
	for _, leaf := range parser.Model.Leaves(true) {
		for _, f := range leaf.Flags {
			for _, name := range f.Envs {
				if flags[name] == "" {
					flags[name] = f.Name + ": " + f.Help
				}
				require.Equal(t, flags[name], f.Name+": "+f.Help, name)
			}
		}
	}
	require.NotEmpty(t, flags)
}

func TestExitStatusOfTheProgramNamesTheCase(t *testing.T) {
	isolate(t)
	dir := program(t)
	for _, c := range []struct {
		code int
		args []string
	}{{0, []string{"version"}}, {2, []string{"get"}}, {5, []string{"ls", "--api-url=http://127.0.0.1:1"}}} {
		cmd := exec.Command(filepath.Join(dir, "berth"), c.args...)
		out, _ := cmd.CombinedOutput()
		require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%v: %s", c.args, out)
	}
}
