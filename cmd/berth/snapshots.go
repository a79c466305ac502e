package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// What calls may take in addition to --request-timeout.
const (
	// snapshotWait is for a call that makes a snapshot or stops a sandbox: it falls asleep, and its files are archived.
	snapshotWait = 17 * time.Minute
	// restoreWait is for a claim from a snapshot: files are restored before the answer.
	restoreWait = 2 * time.Minute
	// wakeWait is for a call that wakes a sandbox: one that is stopped waits for a pod and for its files.
	wakeWait = 4 * time.Minute
	// forkWait is how long a fork waits for warm pods.
	forkWait = time.Minute
)

// maxFork is how many sandboxes the API claims in one call.
const maxFork = 1000

type snapshotCommand struct {
	Create snapshotCreateCommand `cmd:"" help:"Make a snapshot of the files of a sandbox. The sandbox sleeps meanwhile."`
	Ls     snapshotLsCommand     `cmd:"" help:"List snapshots."`
	Rm     snapshotRmCommand     `cmd:"" help:"Delete snapshots. Sandboxes that were made from them stay."`
}

func (o *output) snapshots() view[openapi.Snapshot] {
	return view[openapi.Snapshot]{
		name: func(s openapi.Snapshot) string { return s.SnapshotID },
		columns: []column[openapi.Snapshot]{
			{name: "SNAPSHOT", text: func(s openapi.Snapshot) string { return s.SnapshotID }},
			{name: "SANDBOX", text: func(s openapi.Snapshot) string { return s.SandboxID }},
			{name: "POOL", text: func(s openapi.Snapshot) string { return s.Pool }},
			{name: "AGE", text: func(s openapi.Snapshot) string { return span(o.now().Sub(s.CreatedAt)) }},
			{name: "EXPIRES IN", text: func(s openapi.Snapshot) string {
				if s.ExpiresAt == nil {
					return "never"
				}
				return until(o.now(), *s.ExpiresAt)
			}},
			{name: "SIZE", text: func(s openapi.Snapshot) string { return size(s.SizeBytes) }},
			{name: "FILES", text: func(s openapi.Snapshot) string { return fmt.Sprint(s.Files) }},
			{name: "BYTES", wide: true, text: func(s openapi.Snapshot) string { return size(s.Bytes) }},
			{name: "LEFT OUT", wide: true, text: leftOut},
			{name: "PATHS", wide: true, text: func(s openapi.Snapshot) string { return strings.Join(s.Paths, ",") }},
		},
	}
}

// size shows a number of bytes.
func size(n int64) string {
	for _, unit := range []string{"B", "KiB", "MiB"} {
		if n < 1024 {
			return fmt.Sprintf("%d %s", n, unit)
		}
		n = (n + 512) / 1024
	}
	return fmt.Sprintf("%d GiB", n)
}

// leftOut says how many files, or attributes of files, a snapshot lacks, and why.
func leftOut(s openapi.Snapshot) string {
	all := make([]string, 0, len(s.LeftOut))
	for _, reason := range slices.Sorted(maps.Keys(s.LeftOut)) {
		all = append(all, fmt.Sprintf("%s: %d", reason, s.LeftOut[reason]))
	}
	return strings.Join(all, ", ")
}

type snapshotCreateCommand struct {
	apiFlags
	formatFlags
	ID   string `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
	Name string `placeholder:"NAME[:TAG]" help:"Name of the snapshot. An earlier one of the name and tag is replaced. The default is a random name."`
}

// Run implements the command.
func (c *snapshotCreateCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	s, err := makeSnapshot(ctx, o, t, c.ID, c.Name)
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, o.snapshots(), []openapi.Snapshot{*s}, s)
}

// makeSnapshot makes a snapshot of a sandbox.
func makeSnapshot(ctx context.Context, o *output, t *target, id, name string) (*openapi.Snapshot, error) {
	defer notice(o, "waiting until %s sleeps and its files are archived: 6 s, or minutes if there are many", id)()
	long := *t
	long.wait += snapshotWait
	s, err := call(ctx, &long, func(ctx context.Context) (*openapi.Snapshot, error) {
		return t.api.Snapshot(ctx, id, name)
	})
	if err == nil && len(s.LeftOut) > 0 {
		fmt.Fprintf(o.err, "left out: %s\n", leftOut(*s))
	}
	return s, err
}

type snapshotLsCommand struct {
	apiFlags
	formatFlags
	Sandbox string `complete:"sandbox" placeholder:"ID" help:"Only snapshots of this sandbox."`
	Name    string `placeholder:"NAME[:TAG]" help:"Only snapshots of this name."`
}

// Run implements the command.
func (c *snapshotLsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	filter := openapi.ListSnapshotsParams{SandboxID: nonEmpty(c.Sandbox), Name: nonEmpty(c.Name)}
	all, err := call(ctx, t, func(ctx context.Context) ([]openapi.Snapshot, error) {
		all := []openapi.Snapshot{}
		for s, err := range t.api.Snapshots(ctx, filter) {
			if err != nil {
				return nil, err
			}
			all = append(all, s)
		}
		return all, nil
	})
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, o.snapshots(), all, all)
}

type snapshotRmCommand struct {
	apiFlags
	Names []string `arg:"" name:"snapshot" complete:"snapshot" help:"Names of snapshots: NAME:TAG, or NAME for the tag \"default\"."`
}

// Run implements the command.
func (c *snapshotRmCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	_, err = each(c.Names, func(name string) (none, error) {
		err := do(ctx, t, func(ctx context.Context) error { return t.api.DeleteSnapshot(ctx, name) })
		if err == nil {
			_, err = fmt.Fprintf(o.out, "%s deleted\n", name)
		}
		return none{}, err
	})
	return err
}

type forkCommand struct {
	apiFlags
	formatFlags
	ID      string        `arg:"" name:"sandbox" complete:"sandbox" help:"ID of the sandbox whose files the new ones get."`
	Count   int           `default:"1" placeholder:"SANDBOXES" help:"How many to claim, at most 1000: all, or none."`
	Timeout time.Duration `help:"Time from now until the end of the new ones. The API's default is 5m."`
	networkFlags
}

// Help implements kong.HelpProvider.
func (*forkCommand) Help() string {
	return "It makes a snapshot of the files of the sandbox, claims sandboxes of its pool from that, and deletes the " +
		"snapshot. Memory and processes are not copied, and neither is what the sandbox was claimed with. The new ones may " +
		"reach what the sandbox may reach now, unless --allow-out or --deny-out says otherwise. Headers with secrets are named " +
		"again with --rules. The sandbox sleeps while " +
		"its files are archived."
}

// Run implements the command.
func (c *forkCommand) Run(ctx context.Context, o *output) error {
	switch {
	case c.Count < 1 || c.Count > maxFork: // the API would say so after the snapshot
		return usage("--count %d: must be 1 to %d", c.Count, maxFork)
	case c.Timeout < 0 || c.Timeout%time.Second != 0:
		return usage("--timeout %v: must be whole seconds", c.Timeout)
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	headers, err := c.headers()
	if err != nil {
		return err
	}
	if len(c.AllowOut)+len(c.DenyOut) == 0 { // the files of a sandbox with rules are not for one without
		origin, err := call(ctx, t, func(ctx context.Context) (*openapi.Sandbox, error) { return t.api.Get(ctx, c.ID) })
		if err != nil {
			return err
		}
		if n := origin.Network; n != nil {
			c.AllowOut, c.DenyOut = n.AllowOut, n.DenyOut
		}
		if n := origin.Network; n != nil && len(n.Headers) > 0 && headers == nil {
			return usage("the gateway sets headers for the sandbox, and no call returns their values: name them again with "+
				"--rules; the first is for %s", n.Headers[0].Host)
		}
	}
	// The name is known before the answer, which may not come.
	name := "fork-" + strings.ToLower(rand.Text())
	s, err := makeSnapshot(ctx, o, t, c.ID, name)
	if err != nil {
		if e := (*client.Error)(nil); !errors.As(err, &e) || e.OutcomeUnknown {
			err = cli.WithExitCode(cli.ExitCode(err), fmt.Errorf(
				"%w. The snapshot %s may be made all the same; berth snapshot rm %s deletes it", err, name, name))
		}
		return err
	}
	all, err := c.claim(ctx, o, t, s.SnapshotID)
	// An interrupt of the claim deletes the snapshot too. If that fails, what was claimed is there all the same.
	failed := do(context.WithoutCancel(ctx), t, func(ctx context.Context) error {
		return t.api.DeleteSnapshot(ctx, s.SnapshotID)
	})
	if failed != nil {
		failed = cli.WithExitCode(cli.ExitCode(failed), fmt.Errorf(
			"the snapshot %s was not deleted: %w; berth snapshot rm %s deletes it", s.SnapshotID, failed, s.SnapshotID))
	}
	if err != nil {
		return cli.WithExitCode(cli.ExitCode(err), errors.Join(err, failed))
	}
	return errors.Join(claims(o, c.formatFlags, all), failed)
}

// claim claims the new sandboxes.
func (c *forkCommand) claim(ctx context.Context, o *output, t *target, snapshot string) (*openapi.Claims, error) {
	defer notice(o, "waiting up to %v for warm pods, and up to %v for their files", forkWait, restoreWait)()
	batch := openapi.NewClaims{Pool: snapshot, Count: c.Count, WaitTimeout: new(int64(forkWait / time.Second))}
	if headers, _ := c.headers(); len(c.AllowOut)+len(c.DenyOut) > 0 || headers != nil { // Run has checked them
		batch.Network = &openapi.NewSandboxNetwork{AllowOut: c.AllowOut, DenyOut: c.DenyOut, Rules: headers}
	}
	if c.Timeout > 0 {
		batch.Timeout = new(int64(c.Timeout / time.Second))
	}
	long := *t
	long.wait += forkWait + restoreWait
	return call(ctx, &long, func(ctx context.Context) (*openapi.Claims, error) { return t.api.ClaimBatch(ctx, batch) })
}
