package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/allocator"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
)

type journalCommand struct {
	Check journalCheckCommand `cmd:"" help:"Say whether the allocator's journal is whole and can be read, and which slots are missing or damaged. Changes nothing. Fails if it is not whole."`
	Begin journalBeginCommand `cmd:"" help:"Begin the allocator's journal anew, with what is left of it, after a loss, or after it was restored from a backup. No allocator may lead. Live sandboxes go on; no pod is handed out until no router of before can send requests to its address."`
	Dump  journalDumpCommand  `cmd:"" help:"Print what the allocator's journal holds, oldest first: one line of JSON for each slot that was written. Changes nothing. Fails if the journal is damaged, after having printed what can be read."`
}

// journalFlags say where a journal is.
type journalFlags struct {
	Namespace  string        `short:"n" default:"default" help:"Namespace of the sandboxes."`
	Kubeconfig string        `help:"Kubeconfig file. Empty: the one that kubectl would use."`
	Timeout    time.Duration `default:"1m" help:"How long it may take."`
}

type journalDumpCommand struct {
	journalFlags
}

type journalCheckCommand struct {
	journalFlags
}

type journalBeginCommand struct {
	journalFlags
	Restored bool `help:"The journal is whole, and was restored from a backup."`
	DryRun   bool `help:"Say what would be done, and change nothing."`
}

func (f *journalFlags) clients() (*kube.Clients, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = f.Kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	clients, err := kube.NewClients(config, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return clients, nil
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

// dumped is a line of the dump.
type dumped struct {
	Position uint64            `json:"position"`
	Term     uint64            `json:"term"`
	Journal  string            `json:"journal,omitempty"`
	Slot     int               `json:"slot"`
	Format   int               `json:"format"`
	Bytes    int               `json:"bytes"`
	Error    string            `json:"error,omitempty"`
	Records  []json.RawMessage `json:"records"`
}

// Run implements the command.
func (c *journalDumpCommand) Run(ctx context.Context, o *output) error {
	clients, err := c.clients()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	batches, damage := journal.Dump(ctx, &journal.Objects{Client: clients.Berth, Namespace: c.Namespace})
	if len(batches) == 0 && damage == nil {
		damage = fmt.Errorf("there is no journal in namespace %s", c.Namespace)
	}
	lines := json.NewEncoder(o.out)
	for _, b := range batches {
		if b.Position == 0 && b.Err == nil {
			continue
		}
		line := dumped{Position: b.Position, Term: b.Term, Journal: b.Journal, Slot: b.Index, Format: b.Format, Bytes: len(b.Data), Records: []json.RawMessage{}}
		if b.Err != nil {
			line.Error = b.Err.Error()
			damage = errors.Join(damage, fmt.Errorf("slot %d: %w", b.Index, b.Err))
		}
		for _, r := range b.Records {
			raw, err := protojson.Marshal(r)
			if err != nil {
				return fmt.Errorf("encode record %s: %w", r.GetKey(), err)
			}
			line.Records = append(line.Records, raw)
		}
		if err := lines.Encode(line); err != nil {
			return err
		}
	}
	return damage
}
