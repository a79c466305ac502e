package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/internal/printable"
)

// formatFlags say how a command prints.
type formatFlags struct {
	Output    string `short:"o" default:"table" enum:"table,wide,json,yaml,name" help:"table, wide (more columns), json, yaml or name (IDs or names only)."`
	NoHeaders bool   `help:"Leave out the names of columns."`
}

// watchFlags are those of commands that can go on.
type watchFlags struct {
	Watch    bool          `short:"w" help:"Print what changes, until interrupted."`
	Interval time.Duration `default:"2s" help:"With --watch: time between two looks."`
}

// column is one column of a table.
type column[T any] struct {
	name string
	text func(T) string
	// wide columns are in the format wide only.
	wide bool
	// ticks says that the column changes by itself as time passes.
	ticks bool
	// colour says that the column is a state.
	colour bool
}

// view says how a list of T is printed.
type view[T any] struct {
	columns []column[T]
	name    func(T) string
}

func (v view[T]) shown(wide bool) []column[T] {
	return slices.DeleteFunc(slices.Clone(v.columns), func(c column[T]) bool { return c.wide && !wide })
}

// show prints items. The formats json and yaml print the answer instead.
func show[T any](o *output, f formatFlags, v view[T], items []T, answer any) error {
	switch f.Output {
	case "json", "yaml":
		return encode(o.out, f.Output, answer)
	case "name":
		for _, item := range items {
			if _, err := fmt.Fprintln(o.out, v.name(item)); err != nil {
				return err
			}
		}
		return nil
	}
	if len(items) == 0 {
		_, err := fmt.Fprintln(o.err, "none")
		return err
	}
	return v.table(o, f, items, !f.NoHeaders, make([]int, len(v.columns)))
}

// encode writes an answer as JSON or YAML. In JSON an unprintable character is an escape sequence of JSON. YAML has
// none that every reader takes, so there the string has the text of that sequence, as a table shows it.
func encode(w io.Writer, format string, answer any) error {
	raw, err := json.MarshalIndent(answer, "", "  ")
	if err != nil {
		return err
	}
	if raw = append(raw, '\n'); format == "yaml" {
		var value any
		decoder := json.NewDecoder(bytes.NewReader(raw))
		decoder.UseNumber()
		if err := decoder.Decode(&value); err != nil {
			return err
		}
		if raw, err = json.Marshal(shownIn(value)); err == nil {
			raw, err = yaml.JSONToYAML(raw)
		}
		if err != nil {
			return err
		}
	}
	_, err = w.Write(printable.JSON(raw))
	return err
}

// shownIn returns a decoded JSON value whose strings and names are printable.
func shownIn(value any) any {
	switch v := value.(type) {
	case string:
		return printable.Text(v)
	case []any:
		for i := range v {
			v[i] = shownIn(v[i])
		}
	case map[string]any:
		for _, name := range slices.Collect(maps.Keys(v)) {
			one := shownIn(v[name])
			delete(v, name)
			v[printable.Text(name)] = one
		}
	}
	return value
}

// table prints aligned columns, which are at least of these widths, and widens the widths. No line
// ends in spaces.
func (v view[T]) table(o *output, f formatFlags, items []T, headers bool, width []int) error {
	columns := v.shown(f.Output == "wide")
	rows := make([][]string, 0, len(items)+1)
	if headers {
		row := make([]string, len(columns))
		for i, c := range columns {
			row[i] = c.name
		}
		rows = append(rows, row)
	}
	for _, item := range items {
		rows = append(rows, v.cells(columns, item))
	}
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	coloured := colours(o.raw.out)
	var out strings.Builder
	for n, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			padding := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)+2)
			if coloured && columns[i].colour && (n > 0 || !headers) {
				cell = paint(cell)
			}
			line.WriteString(cell + padding)
		}
		out.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(o.raw.out, out.String()) // the cells are printable, and colours are not
	return err
}

// cells are those of one row.
func (v view[T]) cells(columns []column[T], item T) []string {
	row := make([]string, len(columns))
	for i, c := range columns {
		row[i] = cmp.Or(printable.Line(c.text(item)), "-")
	}
	return row
}

// terminal reports whether a person sees what is written.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func colours(w io.Writer) bool {
	return terminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// paint gives a state the colour of its kind.
func paint(state string) string {
	switch state {
	case "running", "yes", "True":
		return "\x1b[32m" + state + "\x1b[0m"
	case "starting":
		return "\x1b[33m" + state + "\x1b[0m"
	case "no", "False", "refused":
		return "\x1b[31m" + state + "\x1b[0m"
	}
	return state
}

// leastInterval is the time between two looks while much changes.
const leastInterval = 200 * time.Millisecond

// watch prints a list, and then each item that is new or has changed, until ctx ends. A cell that
// only tells the time does not count as a change. It also looks when changes has a value.
func watch[T any](ctx context.Context, o *output, f formatFlags, w watchFlags, v view[T], list func() ([]T, error), changes <-chan struct{}) error {
	columns := v.shown(f.Output == "wide")
	known := map[string]string{}
	headers, width := !f.NoHeaders, make([]int, len(v.columns))
	for {
		items, err := list()
		if err != nil {
			return err
		}
		var changed []T
		live := map[string]bool{}
		for _, item := range items {
			state := strings.Builder{}
			for i, cell := range v.cells(columns, item) {
				if !columns[i].ticks {
					state.WriteString(cell + "\x00")
				}
			}
			name := v.name(item)
			live[name] = true
			if known[name] != state.String() {
				known[name] = state.String()
				changed = append(changed, item)
			}
		}
		for name := range known {
			if !live[name] {
				delete(known, name)
			}
		}
		if len(changed) > 0 {
			if err := showChanged(o, f, v, changed, headers, width); err != nil {
				return err
			}
			headers = false
		}
		began := time.Now()
		for _, wait := range []struct {
			most    time.Duration
			changes <-chan struct{}
		}{{min(w.Interval, leastInterval), nil}, {w.Interval, changes}} {
			timer := time.NewTimer(wait.most - time.Since(began))
			select {
			case <-ctx.Done():
				timer.Stop()
				return nil
			case <-wait.changes:
				timer.Stop()
			case <-timer.C:
			}
		}
	}
}

func showChanged[T any](o *output, f formatFlags, v view[T], changed []T, headers bool, width []int) error {
	switch f.Output {
	case "table", "wide":
		return v.table(o, f, changed, headers, width)
	case "name":
		return show(o, f, v, changed, nil)
	}
	for _, item := range changed {
		if f.Output == "yaml" {
			if _, err := fmt.Fprintln(o.out, "---"); err != nil {
				return err
			}
		}
		if err := encode(o.out, f.Output, item); err != nil {
			return err
		}
	}
	return nil
}

// shown prints what there is after some of several calls have failed.
func shown(err error, n int, print func() error) error {
	if n == 0 {
		return err
	}
	if failed := print(); err == nil {
		return failed
	}
	return err
}

// truncated says how many entries the API has left out.
func truncated(o *output, f formatFlags, n int) error {
	if n == 0 || f.Output == "json" || f.Output == "yaml" {
		return nil
	}
	_, err := fmt.Fprintf(o.err, "%d more; see --limit\n", n)
	return err
}

// span shows a duration for people.
func span(d time.Duration) string { return duration.HumanDuration(d) }

// spanSeconds is span for seconds.
func spanSeconds(seconds float64) string { return span(time.Duration(seconds * float64(time.Second))) }

// until shows the time until a moment.
func until(now, t time.Time) string {
	if t.Year() >= 9999 {
		return "never"
	}
	return span(max(0, t.Sub(now)))
}
