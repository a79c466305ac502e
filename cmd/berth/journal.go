package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/allocator"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/cmd/internal/contexts"
)

type journalCommand struct {
	Check journalCheckCommand `cmd:"" help:"Say whether the journal is whole, and which slots are missing or damaged."`
	Begin journalBeginCommand `cmd:"" help:"Begin the journal anew after a loss, or after it was restored from a backup."`
	Dump  journalDumpCommand  `cmd:"" help:"Print what the journal holds."`
}

// journalFlags say where a journal is.
type journalFlags struct {
	Namespace  string        `short:"n" help:"Namespace of the sandboxes. Left out: that of the context whose kubeconfig is used, else default."`
	Kubeconfig string        `help:"Kubeconfig file. Left out: KUBECONFIG, the current context's, kubectl's own, or a development cluster's."`
	Timeout    time.Duration `default:"1m" help:"How long it may take."`
}

type journalDumpCommand struct {
	journalFlags
	formatFlags
	Key string `help:"Only records whose key begins so, such as sandbox/k3x9, pod/ or session/."`
}

type journalCheckCommand struct {
	journalFlags
}

type journalBeginCommand struct {
	journalFlags
	Restored bool `help:"The journal is whole, and was restored from a backup."`
	DryRun   bool `help:"Say what would be done, and change nothing."`
}

// fill sets what no flag has set.
func (f *journalFlags) fill() error {
	if f.Kubeconfig == "" && os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "" {
		c, from, err := selected(os.Getenv("BERTH_CONTEXT"))
		// A development cluster must not come before the cluster that kubectl uses.
		if _, missing := os.Stat(clientcmd.RecommendedHomeFile); missing == nil && !strings.HasPrefix(from, "context ") {
			c, err = contexts.Context{}, nil
		}
		if err != nil {
			return err
		}
		f.Kubeconfig = c.Kubeconfig
		f.Namespace = cmp.Or(f.Namespace, c.Namespace)
	}
	f.Namespace = cmp.Or(f.Namespace, "default")
	return nil
}

// Help implements kong.HelpProvider.
func (*journalCheckCommand) Help() string {
	return "Changes nothing. Fails if the journal is not whole."
}

// Help implements kong.HelpProvider.
func (*journalBeginCommand) Help() string {
	return "It keeps what is left of the journal. No allocator may lead. Live sandboxes go on. No pod is handed out until no " +
		"earlier router can send requests to its address."
}

// Help implements kong.HelpProvider.
func (*journalDumpCommand) Help() string {
	return "Tables have one line for each record, the oldest first. The formats json and yaml have the slots that were " +
		"written. Changes nothing. Fails if the journal is damaged, after it has printed what can be read."
}

func (f *journalFlags) clients() (*kube.Clients, error) {
	config, err := f.config()
	if err != nil {
		return nil, err
	}
	clients, err := kube.NewClients(config, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return clients, nil
}

// config says how to reach the cluster.
func (f *journalFlags) config() (*rest.Config, error) {
	if err := f.fill(); err != nil {
		return nil, err
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = f.Kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, usage("no kubeconfig: set --kubeconfig or KUBECONFIG, or a context's (berth context set)")
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return config, nil
}

// Run implements the command.
func (c *journalCheckCommand) Run(ctx context.Context, o *output) error {
	clients, err := c.clients()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	found, err := journal.Check(ctx, &journal.Objects{Client: clients.Berth, Namespace: c.Namespace})
	if err != nil {
		return err
	}
	if err := describe(o, found); err != nil {
		return err
	}
	if found.Err != nil {
		return fmt.Errorf("the journal is not whole: %w", found.Err)
	}
	_, err = fmt.Fprintln(o.out, "The journal is whole.")
	return err
}

// describe says what a journal looks like.
func describe(o *output, c *journal.Condition) error {
	text := &strings.Builder{}
	fmt.Fprintf(text, "Journal %s: %d slots, ends at position %d, term %d.\n", cmp.Or(c.ID, "without a name"), c.Slots, c.Position, c.Term)
	if len(c.Missing) > 0 {
		fmt.Fprintf(text, "Missing: %s.\n", slotNames(c.Missing))
	}
	for _, i := range slices.Sorted(maps.Keys(c.Damaged)) {
		fmt.Fprintf(text, "Damaged: %v.\n", c.Damaged[i])
	}
	_, err := io.WriteString(o.out, text.String())
	return err
}

// slotNames lists slots, those that follow each other as a range.
func slotNames(slots []int) string {
	var parts []string
	for i := 0; i < len(slots); {
		j := i
		for j+1 < len(slots) && slots[j+1] == slots[j]+1 {
			j++
		}
		part := fmt.Sprintf("berth-%03d", slots[i])
		if j > i {
			part += fmt.Sprintf(" to berth-%03d", slots[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	return strings.Join(parts, ", ")
}

// Run implements the command.
func (c *journalBeginCommand) Run(ctx context.Context, o *output) error {
	clients, err := c.clients()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	b := allocator.JournalBeginning{Clients: clients, Namespace: c.Namespace, Restored: c.Restored}
	do, would := b.Begin, ""
	if c.DryRun {
		do, would = b.Plan, "Would be done: "
	}
	found, plan, err := do(ctx)
	if found != nil {
		if err := describe(o, found); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	if len(plan.Emptied) > 0 {
		if _, err := fmt.Fprintf(o.out, "%smade without records: %s.\n", would, slotNames(plan.Emptied)); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(o.out, "%sjournal begun anew at position %d, term %d. No pod is handed out until no router of before can send requests to its address.\n", would, plan.Position, plan.Term)
	return err
}
