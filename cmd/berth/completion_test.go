package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCompletionInBashKnowsCommandsFlagsAndObjects runs the script in a real bash, as readline does.
func TestCompletionInBashKnowsCommandsFlagsAndObjects(t *testing.T) {
	bash, err := exec.LookPath("bash")
	require.NoError(t, err)
	_, url := serve(t)
	_, err = berth(t, "context", "set", "stub", "--api-url="+url)
	require.NoError(t, err)
	dir := program(t)
	for _, c := range []struct{ line, want string }{
		{"berth cl", "claim"},
		{"berth completion ", "bash zsh fish"},
		{"berth fence s", "sessions"},
		{"berth ls --wat", "--watch"},
		{"berth ls -o ", "table wide json yaml name"},
		{"berth ls -o=y", "yaml"},
		{"berth ls --output=w", "wide"},
		{"berth ls --pool ", "node python"},
		{"berth up py", "python"},
		{"berth claim ", "node python work:default work:v1"},
		{"berth claim w", "work:default work:v1"},
		{"berth snapshot rm work:v1 ", "work:default work:v1"},
		{"berth claim python ", ""},
		{"berth kill ", first + " " + second},
		{"berth kill " + first + " p", second},
		{"berth kill --all --pool=n", "node"},
		{"berth --context stub get k", first},
		{"berth fence declare-dead --gone ", "router-a router-b"},
		{"berth context use ", "stub"},
		{"berth __", ""},
	} {
		words := strings.Split(c.line, " ")
		cmd := exec.Command(bash, "-c", `source <(berth completion bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_berth
echo "${COMPREPLY[*]}"`, "bash", c.line)
		cmd.Args = append(cmd.Args, bashWords(words)...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, c.want, strings.TrimSuffix(string(out), "\n"), c.line)
	}
}

// bashWords splits words at =, as readline does in COMP_WORDS.
func bashWords(words []string) (all []string) {
	for _, word := range words {
		name, value, given := strings.Cut(word, "=")
		all = append(all, name)
		if given {
			all = append(all, "=", value)
		}
	}
	return all
}

// A shell that is installed must take its script.
func TestCompletionScriptsAreValid(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, err := berth(t, "completion", shell)
		require.NoError(t, err)
		path, err := exec.LookPath(shell)
		if err != nil {
			continue
		}
		cmd := exec.Command(path, "-n")
		cmd.Stdin = strings.NewReader(script)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s: %s", shell, out)
	}
}
