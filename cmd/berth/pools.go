package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/berth-sandbox/berth/api/openapi"
)

type poolsCommand struct {
	Ls       poolsLsCommand       `cmd:"" help:"List pools."`
	Get      poolsGetCommand      `cmd:"" help:"Show pools."`
	Diagnose poolsDiagnoseCommand `cmd:"" help:"Say why a pool does not fill."`
	Scale    poolsScaleCommand    `cmd:"" help:"Change how many pods a pool keeps warm, and how many it may have."`
}

func (o *output) pools() view[openapi.Pool] {
	return view[openapi.Pool]{
		name: func(p openapi.Pool) string { return p.Name },
		columns: []column[openapi.Pool]{
			{name: "POOL", text: func(p openapi.Pool) string { return p.Name }},
			{name: "WARM", text: func(p openapi.Pool) string { return fmt.Sprintf("%d/%s", p.Counts.Warm, keeps(p.Spec)) }},
			{name: "PENDING", text: func(p openapi.Pool) string { return fmt.Sprint(p.Counts.Pending) }},
			{name: "CLAIMED", text: func(p openapi.Pool) string { return fmt.Sprint(p.Counts.Claimed) }},
			{name: "RELEASING", text: func(p openapi.Pool) string { return fmt.Sprint(p.Counts.Releasing) }},
			{name: "MAX", text: func(p openapi.Pool) string {
				if p.Spec.MaxPods == 0 {
					return ""
				}
				return fmt.Sprint(p.Spec.MaxPods)
			}},
			{name: "WAITING", text: func(p openapi.Pool) string { return fmt.Sprint(p.Counts.WaitingClaims) }},
			{name: "READY", colour: true, text: func(p openapi.Pool) string { return condition(p, "Ready").Status }},
			{name: "REASON", text: func(p openapi.Pool) string { return condition(p, "Ready").Reason }},
			{name: "AGE", ticks: true, text: func(p openapi.Pool) string { return span(o.now().Sub(p.CreatedAt)) }},
			{name: "IMAGES", wide: true, text: func(p openapi.Pool) string { return strings.Join(p.Spec.Images, ",") }},
			{name: "IDLE TIMEOUT", wide: true, text: func(p openapi.Pool) string { return optionalSpan(p.Spec.IdleTimeout) }},
			{name: "EGRESS", wide: true, text: func(p openapi.Pool) string { return string(p.Spec.EgressMode) }},
			{name: "MESSAGE", wide: true, text: poolMessage},
		},
	}
}

// keeps says how many warm pods a pool keeps: a number or, with maxWarm, two.
func keeps(spec openapi.PoolSpec) string {
	if spec.MaxWarm > spec.Warm {
		return fmt.Sprintf("%d-%d", spec.Warm, spec.MaxWarm)
	}
	return fmt.Sprint(spec.Warm)
}

func condition(p openapi.Pool, kind string) openapi.Condition {
	for _, c := range p.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return openapi.Condition{}
}

// poolMessage says why a pool is not ready, or what keeps it from what it asks for.
func poolMessage(p openapi.Pool) string {
	if p.Deleting {
		return "it is being deleted"
	}
	if c := condition(p, "Ready"); c.Status != "True" {
		return c.Message
	}
	if c := condition(p, "Degraded"); c.Status == "True" {
		return c.Message
	}
	return ""
}

type poolsLsCommand struct {
	apiFlags
	formatFlags
	watchFlags
}

// Run implements the command.
func (c *poolsLsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	list := func() ([]openapi.Pool, error) { return call(ctx, t, t.api.Pools) }
	if c.Watch {
		return watch(ctx, o, c.formatFlags, c.watchFlags, o.pools(), list, nil)
	}
	all, err := list()
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, o.pools(), all, all)
}

type poolsGetCommand struct {
	apiFlags
	formatFlags
	Names []string `arg:"" name:"pool" complete:"pool" help:"Names of pools."`
}

// Run implements the command.
func (c *poolsGetCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all, err := each(c.Names, func(name string) (openapi.Pool, error) {
		p, err := call(ctx, t, func(ctx context.Context) (*openapi.Pool, error) { return t.api.Pool(ctx, name) })
		if err != nil {
			return openapi.Pool{}, err
		}
		return *p, nil
	})
	return shown(err, len(all), func() error { return show(o, c.formatFlags, o.pools(), all, single(c.Names, all)) })
}

type poolsScaleCommand struct {
	apiFlags
	Name    string `arg:"" name:"pool" complete:"pool" help:"Name of a pool."`
	Warm    *int   `placeholder:"PODS" help:"How many pods to keep warm."`
	MaxWarm *int   `placeholder:"PODS" help:"How many pods to keep warm at most when claims come faster; 0 for no more than --warm."`
	MaxPods *int   `placeholder:"PODS" help:"The most pods of any kind; 0 for no bound."`
}

// Run implements the command.
func (c *poolsScaleCommand) Run(ctx context.Context, o *output) error {
	if c.Warm == nil && c.MaxWarm == nil && c.MaxPods == nil {
		return usage("give --warm, --max-warm or --max-pods")
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	p, err := call(ctx, t, func(ctx context.Context) (*openapi.Pool, error) {
		return t.api.Scale(ctx, c.Name, openapi.ScalePoolJSONRequestBody{Warm: c.Warm, MaxWarm: c.MaxWarm, MaxPods: c.MaxPods})
	})
	if err != nil {
		return err
	}
	bound := "no bound"
	if p.Spec.MaxPods > 0 {
		bound = fmt.Sprintf("at most %d pods", p.Spec.MaxPods)
	}
	_, err = fmt.Fprintf(o.out, "%s keeps %s pods warm, %s\n", p.Name, keeps(p.Spec), bound)
	return err
}
