package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
)

type journalCommand struct {
	Dump journalDumpCommand `cmd:"" help:"Print what the allocator's journal holds, oldest first: one line of JSON for each slot that was written. Changes nothing. Fails if the journal is damaged, after having printed what can be read."`
}

type journalDumpCommand struct {
	Namespace  string        `short:"n" default:"default" help:"Namespace of the sandboxes."`
	Kubeconfig string        `help:"Kubeconfig file. Empty: the one that kubectl would use."`
	Timeout    time.Duration `default:"1m" help:"How long reading may take."`
}

// dumped is a line of the dump.
type dumped struct {
	Position uint64            `json:"position"`
	Term     uint64            `json:"term"`
	Slot     int               `json:"slot"`
	Format   int               `json:"format"`
	Bytes    int               `json:"bytes"`
	Error    string            `json:"error,omitempty"`
	Records  []json.RawMessage `json:"records"`
}

// Run implements the command.
func (c *journalDumpCommand) Run(ctx context.Context, o *output) error {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.Kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	clients, err := kube.NewClients(config, 0, 0)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
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
		line := dumped{Position: b.Position, Term: b.Term, Slot: b.Index, Format: b.Format, Bytes: len(b.Data), Records: []json.RawMessage{}}
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
