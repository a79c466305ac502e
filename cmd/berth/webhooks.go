package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

type webhooksCommand struct {
	Ls         webhooksLsCommand         `cmd:"" help:"List webhooks."`
	Create     webhooksCreateCommand     `cmd:"" help:"Have events sent to a URL."`
	Enable     webhooksEnableCommand     `cmd:"" help:"Send events to webhooks again, from now on."`
	Disable    webhooksDisableCommand    `cmd:"" help:"Send nothing to webhooks for now."`
	Rotate     webhooksRotateCommand     `cmd:"" help:"Change the secret of a webhook."`
	Delete     webhooksDeleteCommand     `cmd:"" help:"Delete webhooks."`
	Deliveries webhooksDeliveriesCommand `cmd:"" help:"List the latest attempts to deliver events to a webhook."`
}

// lifecycle is the prefix of the types of events, which this command leaves out.
const lifecycle = "sandbox.lifecycle."

var shownWebhooks = view[openapi.Webhook]{
	name: func(w openapi.Webhook) string { return w.ID },
	columns: []column[openapi.Webhook]{
		{name: "ID", text: func(w openapi.Webhook) string { return w.ID }},
		{name: "NAME", text: func(w openapi.Webhook) string { return w.Name }},
		{name: "URL", text: func(w openapi.Webhook) string { return w.URL }},
		{name: "EVENTS", text: func(w openapi.Webhook) string {
			var all []string
			for _, t := range w.Events {
				all = append(all, strings.TrimPrefix(string(t), lifecycle))
			}
			return strings.Join(all, ",")
		}},
		{name: "ENABLED", colour: true, text: func(w openapi.Webhook) string {
			if w.Enabled {
				return "yes"
			}
			return "no"
		}},
		{name: "TEAM", wide: true, text: func(w openapi.Webhook) string { return w.TeamID }},
		{name: "CREATED", wide: true, text: func(w openapi.Webhook) string { return w.CreatedAt.UTC().Format(time.RFC3339) }},
	},
}

var shownDeliveries = view[openapi.WebhookDelivery]{
	name: func(d openapi.WebhookDelivery) string { return d.ID },
	columns: []column[openapi.WebhookDelivery]{
		{name: "TIME", text: func(d openapi.WebhookDelivery) string { return d.Timestamp.UTC().Format(time.RFC3339) }},
		{name: "EVENT", text: func(d openapi.WebhookDelivery) string { return strings.TrimPrefix(d.EventType, lifecycle) }},
		{name: "SANDBOX", text: func(d openapi.WebhookDelivery) string { return d.SandboxID }},
		{name: "STATUS", text: func(d openapi.WebhookDelivery) string { return string(d.Status) }},
		{name: "ATTEMPT", text: func(d openapi.WebhookDelivery) string { return fmt.Sprint(d.Attempt) }},
		{name: "CODE", text: func(d openapi.WebhookDelivery) string {
			if d.ResponseHTTPStatusCode == nil {
				return ""
			}
			return fmt.Sprint(*d.ResponseHTTPStatusCode)
		}},
		{name: "TOOK", text: func(d openapi.WebhookDelivery) string {
			return (time.Duration(d.DurationMs) * time.Millisecond).String()
		}},
		{name: "ERROR", text: func(d openapi.WebhookDelivery) string { return deref(d.ErrorMessage) }},
		{name: "ID", wide: true, text: func(d openapi.WebhookDelivery) string { return d.ID }},
		{name: "EVENT ID", wide: true, text: func(d openapi.WebhookDelivery) string { return d.EventID }},
	},
}

type webhooksLsCommand struct {
	apiFlags
	formatFlags
}

// Run implements the command.
func (c *webhooksLsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all, err := call(ctx, t, t.api.Webhooks)
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, shownWebhooks, all, all)
}

// secretFlags say which secret a webhook gets.
type secretFlags struct {
	SecretFile string `placeholder:"FILE" help:"File with the secret of the signatures, 8 to 256 characters. Left out: a new one, which is printed."`
}

// secret returns the secret, and what to do with it when the webhook has it.
func (f *secretFlags) secret(o *output) (string, func() error, error) {
	if f.SecretFile == "" {
		secret := rand.Text()
		return secret, func() error {
			_, err := fmt.Fprintln(o.err, "the secret of the signatures; it is shown only now:")
			_, err2 := fmt.Fprintln(o.out, secret)
			return errors.Join(err, err2)
		}, nil
	}
	raw, err := os.ReadFile(f.SecretFile)
	if err != nil {
		return "", nil, cli.WithExitCode(cli.ExitUsage, fmt.Errorf("--secret-file: %w", err))
	}
	return strings.TrimSpace(string(raw)), func() error { return nil }, nil
}

type webhooksCreateCommand struct {
	apiFlags
	secretFlags
	Name  string   `required:"" help:"A name for people."`
	URL   string   `required:"" arg:"" name:"url" help:"The URL: https, at a public address."`
	Event []string `default:"created,updated,killed" help:"Types of events: created, updated, killed."`
}

// Run implements the command. A new secret alone is on the standard output.
func (c *webhooksCreateCommand) Run(ctx context.Context, o *output) error {
	secret, print, err := c.secret(o)
	if err != nil {
		return err
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	body := openapi.NewWebhook{Name: c.Name, URL: c.URL, SignatureSecret: secret}
	for _, e := range c.Event {
		body.Events = append(body.Events, openapi.EventType(lifecycle+strings.TrimPrefix(e, lifecycle)))
	}
	w, err := call(ctx, t, func(ctx context.Context) (*openapi.Webhook, error) { return t.api.CreateWebhook(ctx, body) })
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(o.err, "webhook %s gets the events from now on\n", w.ID)
	return errors.Join(err, print())
}

type webhooksRotateCommand struct {
	apiFlags
	secretFlags
	ID string `arg:"" name:"id" help:"ID of the webhook."`
}

// Run implements the command. A new secret alone is on the standard output.
func (c *webhooksRotateCommand) Run(ctx context.Context, o *output) error {
	secret, print, err := c.secret(o)
	if err != nil {
		return err
	}
	if err := change(ctx, o, c.apiFlags, []string{c.ID}, openapi.WebhookChange{SignatureSecret: &secret}, "has another secret"); err != nil {
		return err
	}
	return print()
}

// change changes webhooks.
func change(ctx context.Context, o *output, f apiFlags, ids []string, c openapi.WebhookChange, what string) error {
	t, err := f.target()
	if err != nil {
		return err
	}
	_, err = each(ids, func(id string) (string, error) {
		_, err := call(ctx, t, func(ctx context.Context) (*openapi.Webhook, error) { return t.api.UpdateWebhook(ctx, id, c) })
		if err == nil {
			_, err = fmt.Fprintf(o.err, "webhook %s %s\n", id, what)
		}
		return id, err
	})
	return err
}

type webhooksEnableCommand struct {
	apiFlags
	IDs []string `arg:"" name:"id" help:"IDs of webhooks."`
}

// Run implements the command.
func (c *webhooksEnableCommand) Run(ctx context.Context, o *output) error {
	return change(ctx, o, c.apiFlags, c.IDs, openapi.WebhookChange{Enabled: new(true)}, "is enabled")
}

type webhooksDisableCommand struct {
	apiFlags
	IDs []string `arg:"" name:"id" help:"IDs of webhooks."`
}

// Run implements the command.
func (c *webhooksDisableCommand) Run(ctx context.Context, o *output) error {
	return change(ctx, o, c.apiFlags, c.IDs, openapi.WebhookChange{Enabled: new(false)}, "is disabled")
}

type webhooksDeleteCommand struct {
	apiFlags
	IDs []string `arg:"" name:"id" help:"IDs of webhooks."`
}

// Run implements the command.
func (c *webhooksDeleteCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	_, err = each(c.IDs, func(id string) (string, error) {
		_, err := call(ctx, t, func(ctx context.Context) (string, error) { return id, t.api.DeleteWebhook(ctx, id) })
		if err == nil {
			_, err = fmt.Fprintf(o.err, "webhook %s is deleted\n", id)
		}
		return id, err
	})
	return err
}

type webhooksDeliveriesCommand struct {
	apiFlags
	formatFlags
	ID    string `arg:"" name:"id" help:"ID of the webhook."`
	Limit int    `default:"20" placeholder:"ATTEMPTS" help:"How many to show at most, 1 to 100."`
}

// Run implements the command.
func (c *webhooksDeliveriesCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all, err := call(ctx, t, func(ctx context.Context) ([]openapi.WebhookDelivery, error) {
		return t.api.Deliveries(ctx, c.ID, c.Limit)
	})
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, shownDeliveries, all, all)
}
