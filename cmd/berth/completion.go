package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/contexts"
)

type completionCommand struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help implements kong.HelpProvider.
func (*completionCommand) Help() string {
	return "Names of pools, snapshots, sandboxes, routers and contexts are completed too.\n\n" +
		"bash: source <(berth completion bash)\n\n" +
		"zsh: source <(berth completion zsh), after compinit\n\n" +
		"fish: berth completion fish | source"
}

// scripts call the command __complete with the words up to the cursor. It prints a candidate in
// each line, with its description behind a tab.
var scripts = map[string]string{
	// bash splits words at = and :, so that the line is split again here.
	"bash": `_berth() {
  local cur words line
  read -r -a words <<< "${COMP_LINE:0:COMP_POINT}"
  if [[ ${COMP_LINE:0:COMP_POINT} == *[[:space:]] ]]; then words+=(""); fi
  cur=${words[${#words[@]}-1]}
  local typed=${cur%"${COMP_WORDS[COMP_CWORD]}"}
  COMPREPLY=()
  while IFS= read -r line; do
    line=${line%%$'\t'*}
    COMPREPLY+=("${line#"$typed"}")
  done < <("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
}
complete -o default -F _berth berth
`,
	"zsh": `#compdef berth
_berth() {
  local -a candidates
  local line
  while IFS= read -r line; do
    line=${line//:/\\:}
    candidates+=("${line/$'\t'/:}")
  done < <("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
  _describe berth candidates || _files
}
compdef _berth berth
`,
	"fish": `complete -c berth -f -a '(set -l w (commandline -opc); $w[1] __complete $w[2..] (commandline -ct) 2>/dev/null)'
`,
}

// Run implements the command.
func (c *completionCommand) Run(o *output) error {
	_, err := io.WriteString(o.out, scripts[c.Shell])
	return err
}

// completionTimeout bounds what completion asks the API, because a person waits for it.
const completionTimeout = 2 * time.Second

type completeCommand struct {
	Words []string `arg:"" optional:""`
}

// Run implements the command. It prints nothing if it cannot complete.
func (c *completeCommand) Run(ctx context.Context, k *kong.Context, o *output) error {
	words := c.Words
	if len(words) == 0 {
		words = []string{""}
	}
	s := completion{node: k.Model.Node, flags: map[string]string{}}
	for _, word := range words[:len(words)-1] {
		s.read(word)
	}
	current := words[len(words)-1]
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	for _, candidate := range s.candidates(ctx, current) {
		if strings.HasPrefix(candidate, current) {
			if _, err := fmt.Fprintln(o.out, candidate); err != nil {
				return err
			}
		}
	}
	return nil
}

// completion is where a command line has come to.
type completion struct {
	node *kong.Node
	// positional is the number of arguments of node so far.
	positional int
	// pending is the flag whose value comes next.
	pending *kong.Flag
	flags   map[string]string
}

// read takes a complete word.
func (s *completion) read(word string) {
	switch {
	case s.pending != nil:
		s.flags[s.pending.Name] = word
		s.pending = nil
	case strings.HasPrefix(word, "-") && word != "-":
		name, value, given := strings.Cut(word, "=")
		flag := s.flag(name)
		switch {
		case flag == nil || flag.IsBool():
		case given:
			s.flags[flag.Name] = value
		default:
			s.pending = flag
		}
	default:
		for _, child := range s.node.Children {
			if child.Name == word || slices.Contains(child.Aliases, word) {
				s.node, s.positional = child, 0
				return
			}
		}
		s.positional++
	}
}

func (s *completion) flag(name string) *kong.Flag {
	for _, group := range s.node.AllFlags(true) {
		for _, flag := range group {
			if name == "--"+flag.Name || flag.Short != 0 && name == "-"+string(flag.Short) {
				return flag
			}
		}
	}
	return nil
}

// candidates returns what may come next.
func (s *completion) candidates(ctx context.Context, current string) (all []string) {
	name, _, given := strings.Cut(current, "=")
	switch {
	case s.pending != nil:
		return s.values(ctx, s.pending.Value)
	case strings.HasPrefix(current, "-") && given:
		if flag := s.flag(name); flag != nil {
			for _, value := range s.values(ctx, flag.Value) {
				all = append(all, name+"="+value)
			}
		}
		return all
	case strings.HasPrefix(current, "-"):
		for _, group := range s.node.AllFlags(true) {
			for _, flag := range group {
				all = append(all, "--"+flag.Name+"\t"+flag.Help)
			}
		}
		return all
	case len(s.node.Children) > 0:
		for _, child := range s.node.Children {
			if !child.Hidden {
				all = append(all, child.Name+"\t"+child.Help)
			}
		}
		return all
	}
	if n := len(s.node.Positional); n > 0 {
		at := min(s.positional, n-1)
		if argument := s.node.Positional[at]; at == s.positional || argument.IsSlice() {
			return s.values(ctx, argument)
		}
	}
	return nil
}

// values returns the values of a flag or an argument. The tag complete says what it names.
func (s *completion) values(ctx context.Context, v *kong.Value) (all []string) {
	if v.Enum != "" {
		return strings.Split(v.Enum, ",")
	}
	kind := v.Tag.Get("complete")
	if kind == "" {
		return nil
	}
	if kind == "context" {
		file, _, _ := configuration()
		development, _ := contexts.Development()
		return append(contexts.Names(file.Contexts), contexts.Names(development)...)
	}
	flags := apiFlags{
		Context: s.flags["context"], APIURL: s.flags["api-url"], APIKeyFile: s.flags["api-key-file"],
		CAFile: s.flags["ca-file"], RequestTimeout: completionTimeout,
	}
	flags.fromEnvironment()
	t, err := flags.target()
	if err != nil {
		return nil
	}
	switch kind {
	case "pool", "source":
		pools, _ := t.api.Pools(ctx)
		for _, p := range pools {
			all = append(all, p.Name)
		}
		if kind == "source" {
			all = append(all, snapshotNames(ctx, t)...)
		}
	case "snapshot":
		return snapshotNames(ctx, t)
	case "sandbox":
		for s, err := range t.api.Find(ctx, openapi.FindSandboxesParams{Limit: new(pageLength)}) {
			if err != nil || len(all) == pageLength {
				break
			}
			all = append(all, s.SandboxID+"\t"+s.Pool)
		}
	case "session":
		sessions, err := t.api.Sessions(ctx, 1000)
		if err == nil {
			for _, s := range sessions.Sessions {
				all = append(all, s.SessionID)
			}
		}
	}
	return all
}

// snapshotNames returns the names of snapshots, which an API without a store refuses.
func snapshotNames(ctx context.Context, t *target) (all []string) {
	for s, err := range t.api.Snapshots(ctx, openapi.ListSnapshotsParams{}) {
		if err != nil || len(all) == pageLength {
			break
		}
		all = append(all, s.SnapshotID+"\t"+s.Pool)
	}
	return all
}
