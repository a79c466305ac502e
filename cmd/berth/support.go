package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/cmd/internal/support"
)

type supportCommand struct {
	apiFlags
	Namespace        string        `short:"n" help:"Namespace of the sandboxes. Left out: that of the context whose kubeconfig is used, else default."`
	Kubeconfig       string        `help:"Kubeconfig file. Left out: KUBECONFIG, the current context's, kubectl's own, or a development cluster's."`
	ReleaseNamespace string        `help:"Namespace of Berth's pods. Left out: all namespaces are searched."`
	Since            time.Duration `default:"1h" help:"Age of the oldest line of a log: 1s to 24h."`
	Timeout          time.Duration `default:"5m" help:"How long all of it may take."`
	Output           string        `short:"o" placeholder:"FILE" help:"File to write, which must not exist. Left out: berth-support-<time>.tar.gz in this directory."`
}

// Help implements kong.HelpProvider.
func (*supportCommand) Help() string {
	return "Collects objects, journal, fences, logs, metrics and Envoy's configuration into one archive. It changes nothing in " +
		"the cluster. It removes keys, tokens, Secrets, environment variables, and metadata and commands of sandboxes. It cannot " +
		"know a secret that a program has written into a log in another form, so look through the archive before you give it " +
		"away. Without a key of an admin the state that the API shows is missing."
}

// Run implements the command.
func (c *supportCommand) Run(ctx context.Context, o *output) (err error) {
	if c.Since < time.Second || c.Since > 24*time.Hour {
		return usage("--since %v: must be 1s to 24h", c.Since)
	}
	cluster := journalFlags{Namespace: c.Namespace, Kubeconfig: c.Kubeconfig}
	config, err := cluster.config()
	if err != nil {
		return err
	}
	clients, err := cluster.clients()
	if err != nil {
		return err
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	dir := "berth-support-" + o.now().UTC().Format("20060102-150405")
	if c.Output == "" {
		c.Output = dir + ".tar.gz"
	}
	file, err := os.OpenFile(c.Output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return usage("--output: %v", err)
	}
	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			err = errors.Join(err, os.Remove(c.Output))
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	index, err := support.Write(ctx, file, dir, support.Options{
		Config: config, Namespace: cluster.Namespace, Release: c.ReleaseNamespace, Since: c.Since, Secrets: []string{t.key},
		Sources: append(c.state(t),
			support.Source{Name: "version.json", Read: func(context.Context) ([]byte, error) {
				return json.Marshal(cli.Version())
			}},
			support.Source{Name: "journal.json", Read: func(ctx context.Context) ([]byte, error) {
				batches, damage := journal.Dump(ctx, &journal.Objects{Client: clients.Berth, Namespace: cluster.Namespace})
				slots, _, err := dump(batches, "")
				if err := errors.Join(damage, err); err != nil && len(slots) == 0 {
					return nil, err
				}
				return json.Marshal(slots)
			}}),
	})
	if err != nil {
		return err
	}
	for _, f := range index.Failed() {
		what := "is larger than an archive takes"
		if f.Error != "" {
			what = f.Error
		}
		if _, err := fmt.Fprintf(o.err, "missing: %s: %s\n", f.Name, what); err != nil {
			return err
		}
	}
	all := len(index.Files)
	_, err = fmt.Fprintf(o.out, "%s: %d of %d sources\n", filepath.Clean(c.Output), all-len(index.Failed()), all)
	return err
}

// state is what the API shows.
func (c *supportCommand) state(t *target) []support.Source {
	source := func(name string, read func(context.Context) (any, error)) support.Source {
		return support.Source{Name: "state/" + name + ".json", Read: func(ctx context.Context) ([]byte, error) {
			v, err := read(ctx)
			if err != nil {
				return nil, t.explain(ctx, err)
			}
			return json.Marshal(v)
		}}
	}
	return []support.Source{
		source("pools", func(ctx context.Context) (any, error) { return t.api.Pools(ctx) }),
		source("fences", func(ctx context.Context) (any, error) { return t.api.Fences(ctx, 1000) }),
		source("sessions", func(ctx context.Context) (any, error) { return t.api.Sessions(ctx, 1000) }),
		source("last-active", func(ctx context.Context) (any, error) {
			return t.api.LastActive(ctx, openapi.LastActiveParams{Limit: new(10_000)})
		}),
		source("sandboxes", func(ctx context.Context) (any, error) {
			all := []openapi.SandboxRecord{}
			phases := []openapi.RecordPhase{"starting", "running", "fallingAsleep", "asleep", "waking", "stopped", "released", "ended"}
			for s, err := range t.api.Find(ctx, openapi.FindSandboxesParams{Limit: new(1000), Phase: phases}) {
				if err != nil {
					return nil, err
				}
				if all = append(all, s); len(all) == 10_000 {
					break
				}
			}
			return all, nil
		}),
	}
}
