package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/console"
)

type consoleCommand struct {
	apiFlags
	NoOpen bool `help:"Print the address, and open nothing."`
}

// consoleEnd bounds the end of the command: streams of events do not end by themselves.
const consoleEnd = time.Second

// Run implements the command.
func (c *consoleCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	// A key that is wrong, or an API that is too old, is an error here and not in the browser.
	if _, err := call(ctx, t, func(ctx context.Context) (*openapi.Caller, error) { return t.api.Caller(ctx) }); err != nil {
		return err
	}
	entry := console.Entry{Key: t.key, Token: rand.Text()}
	transport, err := newTransport(t.CAFile, t.dialer())
	if err != nil {
		return cli.WithExitCode(cli.ExitUsage, err)
	}
	transport.DisableKeepAlives, transport.IdleConnTimeout = false, time.Minute
	defer transport.CloseIdleConnections()
	pages, err := console.New(console.Options{API: transport, APIURL: t.APIURL, Entry: &entry, Log: zap.NewNop()})
	if err != nil {
		return err
	}
	server, err := cli.Listen("console", "127.0.0.1:0", console.MaxConns)
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(pages) }()
	defer func() {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), consoleEnd)
		defer cancel()
		server.Stop(limit)
	}()
	u := "http://" + server.Addr().String() + entry.Path()
	if _, err := fmt.Fprintf(o.out, "%s\nThe address works once. Ctrl-C ends the console.\n", u); err != nil {
		return err
	}
	if !c.NoOpen {
		if err := browse(ctx, u); err != nil {
			fmt.Fprintln(o.err, err)
		}
	}
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
		return nil
	}
}
