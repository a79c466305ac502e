package docs

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

// Flags describes the flags of a program and of its subcommands in Markdown. The program
// is a pointer to the struct that the program parses its arguments into, and prefix is the
// one of its environment variables, or "" if only flags that name a variable have one.
func Flags(t *testing.T, program any, name, prefix string) string {
	t.Helper()
	options := []kong.Option{kong.Name(name), kong.Vars{"version": ""}}
	if prefix != "" {
		options = append(options, kong.DefaultEnvars(prefix))
	}
	parser, err := kong.New(program, options...)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, leaf := range parser.Model.Leaves(true) {
		if len(parser.Model.Children) > 0 {
			fmt.Fprintf(&out, "### %s\n\n%s\n\n", leaf.FullPath(), Cell(strings.TrimSpace(leaf.Help+" "+leaf.Detail)))
		}
		out.WriteString(flagTable(t, leaf))
	}
	if len(parser.Model.Children) == 0 {
		out.WriteString(flagTable(t, parser.Model.Node))
	}
	return out.String()
}

func flagTable(t *testing.T, command *kong.Node) string {
	t.Helper()
	var rows strings.Builder
	for _, arg := range command.Positional {
		fmt.Fprintf(&rows, "| %s | %s | required | | %s |\n", code("<"+arg.Name+">"), unit(t, arg), Cell(arg.Help))
	}
	for _, flags := range command.AllFlags(true) {
		for _, flag := range flags {
			if flag.Name == "help" || flag.Name == "version" {
				continue
			}
			names := code("--" + flag.Name)
			if flag.Short != 0 {
				names = code("-"+string(flag.Short)) + ", " + names
			}
			preset := code(flag.Default)
			switch {
			case flag.Required:
				preset = "required"
			case flag.IsBool() && flag.Default == "":
				preset = code("false")
			case flag.Default == "" && (flag.Target.CanInt() || flag.Target.CanUint()):
				preset = code("0")
			}
			envs := make([]string, len(flag.Envs))
			for i, env := range flag.Envs {
				envs[i] = code(env)
			}
			fmt.Fprintf(&rows, "| %s | %s | %s | %s | %s |\n",
				names, unit(t, flag.Value), preset, strings.Join(envs, ", "), Cell(flag.Help))
		}
	}
	if rows.Len() == 0 {
		return "No flags.\n\n"
	}
	return "| flag | value | default | environment | meaning |\n|---|---|---|---|---|\n" + rows.String() + "\n"
}

// unit names what a value of the flag is. A number needs a placeholder that is its unit.
func unit(t *testing.T, value *kong.Value) string {
	t.Helper()
	if value.Enum != "" {
		return "one of " + code(strings.ReplaceAll(value.Enum, ",", "`, `"))
	}
	of := value.Target.Type()
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of == reflect.TypeFor[time.Duration]() {
		return "duration"
	}
	switch kind := of.Kind(); kind {
	case reflect.Bool:
		return "switch"
	case reflect.String:
		return "text"
	case reflect.Slice:
		return "list"
	case reflect.Map:
		return "pairs"
	default:
		if value.Flag == nil || value.Flag.PlaceHolder == "" {
			t.Errorf("--%s: a flag of type %v needs a placeholder that names the unit", value.Name, kind)
			return "number"
		}
		return "number: " + strings.ToLower(strings.ReplaceAll(value.Flag.PlaceHolder, "-", " "))
	}
}
