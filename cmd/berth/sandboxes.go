package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

func (o *output) sandboxes() view[openapi.Sandbox] {
	return view[openapi.Sandbox]{
		name: func(s openapi.Sandbox) string { return s.SandboxID },
		columns: []column[openapi.Sandbox]{
			{name: "SANDBOX", text: func(s openapi.Sandbox) string { return s.SandboxID }},
			{name: "POOL", text: func(s openapi.Sandbox) string { return s.TemplateID }},
			{name: "PHASE", colour: true, text: func(s openapi.Sandbox) string { return string(s.Phase) }},
			{name: "AGE", ticks: true, text: func(s openapi.Sandbox) string { return span(o.now().Sub(s.StartedAt)) }},
			{name: "ENDS IN", ticks: true, text: func(s openapi.Sandbox) string { return until(o.now(), s.EndAt) }},
			{name: "IDLE TIMEOUT", wide: true, text: func(s openapi.Sandbox) string { return optionalSpan(s.IdleTimeout) }},
			{name: "ACCESS", wide: true, text: func(s openapi.Sandbox) string { return string(s.Access) }},
			{name: "USER", wide: true, text: func(s openapi.Sandbox) string { return s.User }},
			{name: "POD", wide: true, text: func(s openapi.Sandbox) string { return s.PodName }},
			{name: "METADATA", wide: true, text: func(s openapi.Sandbox) string { return metadataText(s.Metadata) }},
			{name: "URL", text: func(s openapi.Sandbox) string { return s.URL }},
		},
	}
}

type claimCommand struct {
	apiFlags
	formatFlags
	Pool        string            `arg:"" optional:"" complete:"source" help:"Name of the pool, or of a snapshot (NAME:TAG). It can be left out if there is only one pool."`
	Timeout     time.Duration     `help:"Time from now until the end. The API's default is 5m."`
	IdleTimeout *time.Duration    `help:"Time without use after which the sandbox is released; 0s for never. The pool's if it is left out."`
	Wait        time.Duration     `default:"10s" help:"How long to wait for a warm pod, at most 5m."`
	Metadata    map[string]string `short:"m" mapsep:"none" placeholder:"KEY=VALUE" help:"Metadata of the sandbox. Can be repeated."`
	User        string            `help:"User, kept with the sandbox."`
	Access      *string           `enum:"public,token,team" help:"Who may send requests to it: public, token or team. The pool's if it is left out."`
	MaskHost    string            `placeholder:"HOST" help:"Host header that the sandbox sees, such as 'localhost:$${PORT}' (quoted)."`
	HTTPSPort   []int             `name:"https-port" placeholder:"PORT" help:"Port on which the sandbox speaks TLS. Can be repeated."`
	Key         string            `help:"Idempotency key: the same key and claim get the same sandboxes."`
	Count       int               `default:"1" placeholder:"SANDBOXES" help:"How many to claim in one call, at most 1000: all, or none."`
	AtLeast     int               `placeholder:"SANDBOXES" help:"How many of --count are enough when --wait is over. Left out: all."`
	Trace       bool              `help:"Have the allocators send a trace of this claim to the installation's collector, and print its ID."`
	networkFlags
	valueFlags
}

// Run implements the command.
func (c *claimCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	if c.Pool == "" {
		if c.Pool, err = onlyPool(ctx, t); err != nil {
			return err
		}
	}
	claim := openapi.NewSandbox{TemplateID: c.Pool, Metadata: c.Metadata}
	for _, d := range []struct {
		flag string
		from *time.Duration
		into **int64
	}{{"--timeout", given(c.Timeout), &claim.Timeout}, {"--idle-timeout", c.IdleTimeout, &claim.IdleTimeout}, {"--wait", &c.Wait, &claim.WaitTimeout}} {
		if d.from == nil {
			continue
		}
		if *d.from < 0 || *d.from%time.Second != 0 {
			return cli.WithExitCode(cli.ExitUsage, fmt.Errorf("%s %v: must be whole seconds", d.flag, *d.from))
		}
		*d.into = new(int64(*d.from / time.Second))
	}
	if err := c.into(&claim, os.Stdin); err != nil {
		return err
	}
	if c.User != "" {
		claim.User = &c.User
	}
	if c.Access != nil {
		claim.Access = new(openapi.Access(*c.Access))
	}
	headers, err := c.headers()
	if err != nil {
		return err
	}
	if c.MaskHost != "" || len(c.HTTPSPort) > 0 || len(c.AllowOut) > 0 || len(c.DenyOut) > 0 || headers != nil {
		claim.Network = &openapi.NewSandboxNetwork{
			MaskRequestHost: nonEmpty(c.MaskHost), HTTPSPorts: c.HTTPSPort, AllowOut: c.AllowOut, DenyOut: c.DenyOut, Rules: headers,
		}
	}
	switch {
	case c.Count < 1:
		return usage("--count %d: must be 1 or more", c.Count)
	case c.AtLeast < 0 || c.AtLeast > c.Count:
		return usage("--at-least %d: must be 1 to %d, which is --count", c.AtLeast, c.Count)
	}
	defer notice(o, "waiting up to %v for a warm pod of %s", c.Wait, c.Pool)()
	if t.wait += c.Wait; strings.Contains(c.Pool, ":") {
		t.wait += restoreWait
	}
	if c.Trace {
		traced := &traced{next: t.http.Transport}
		t.http.Transport = traced
		defer traced.tell(o)
	}
	if c.Count > 1 {
		return c.batch(ctx, o, t, claim)
	}
	s, err := call(ctx, t, func(ctx context.Context) (*openapi.Sandbox, error) {
		if c.Key != "" {
			return t.api.ClaimOnce(ctx, c.Key, claim)
		}
		return t.api.Claim(ctx, claim)
	})
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, o.sandboxes(), []openapi.Sandbox{*s}, s)
}

// batch claims several sandboxes with the fields of one claim.
func (c *claimCommand) batch(ctx context.Context, o *output, t *target, claim openapi.NewSandbox) error {
	var batch openapi.NewClaims
	raw, err := json.Marshal(claim)
	if err == nil {
		err = json.Unmarshal(raw, &batch) // the API's document gives both the same options
	}
	if err != nil {
		return err
	}
	batch.Pool, batch.Count = c.Pool, c.Count
	if c.AtLeast > 0 {
		batch.AtLeast = &c.AtLeast
	}
	all, err := call(ctx, t, func(ctx context.Context) (*openapi.Claims, error) {
		if c.Key != "" {
			return t.api.ClaimBatchOnce(ctx, c.Key, batch)
		}
		return t.api.ClaimBatch(ctx, batch)
	})
	if err != nil {
		return err
	}
	return claims(o, c.formatFlags, all)
}

// claims prints the sandboxes of a batch.
func claims(o *output, f formatFlags, all *openapi.Claims) error {
	if n := len(all.Ended); n > 0 {
		fmt.Fprintf(o.err, "%d of the batch have ended: %s\n", n, strings.Join(all.Ended, ", "))
	}
	return show(o, f, o.sandboxes(), all.Sandboxes, all)
}

// notice says on a terminal after a second what is waited for, until stop is called.
func notice(o *output, format string, args ...any) (stop func()) {
	if !terminal(o.raw.err) {
		return func() {}
	}
	timer := time.AfterFunc(time.Second, func() { fmt.Fprintf(o.err, format+"\n", args...) })
	return func() { timer.Stop() }
}

func given(d time.Duration) *time.Duration {
	if d == 0 {
		return nil
	}
	return &d
}

// onlyPool returns the name of the pool if there is one.
func onlyPool(ctx context.Context, t *target) (string, error) {
	pools, err := call(ctx, t, t.api.Pools)
	if err != nil {
		return "", err
	}
	names := make([]string, len(pools))
	for i, p := range pools {
		names[i] = p.Name
	}
	switch len(names) {
	case 0:
		return "", cli.WithExitCode(exitNotFound, errors.New("there is no pool; create a SandboxPool with kubectl"))
	case 1:
		return names[0], nil
	}
	return "", cli.WithExitCode(cli.ExitUsage, fmt.Errorf("name one of the pools: %s", strings.Join(names, ", ")))
}

// filterFlags select sandboxes.
type filterFlags struct {
	Pool     string            `complete:"pool" help:"Only sandboxes of this pool."`
	Team     string            `help:"Only sandboxes of this team."`
	User     string            `help:"Only sandboxes of this user."`
	Metadata map[string]string `short:"m" mapsep:"none" placeholder:"KEY=VALUE" help:"Only sandboxes with this metadata. Can be repeated."`
}

func (f *filterFlags) empty() bool {
	return f.Pool == "" && f.Team == "" && f.User == "" && len(f.Metadata) == 0
}

// pageLength is that of a list that is read to its end.
const pageLength = 1000

func (f *filterFlags) list(ctx context.Context, t *target, phases []string) ([]openapi.SandboxRecord, error) {
	params := openapi.FindSandboxesParams{
		Pool: nonEmpty(f.Pool), Team: nonEmpty(f.Team), User: nonEmpty(f.User), Limit: new(pageLength),
	}
	for _, phase := range phases {
		params.Phase = append(params.Phase, openapi.RecordPhase(phase))
	}
	return call(ctx, t, func(ctx context.Context) ([]openapi.SandboxRecord, error) {
		all := []openapi.SandboxRecord{}
		for s, err := range t.api.Find(ctx, params) {
			if err != nil {
				return nil, err
			}
			if f.has(s.Metadata) {
				all = append(all, s)
			}
		}
		return all, nil
	})
}

// has reports whether a sandbox has the metadata that is asked for.
func (f *filterFlags) has(metadata map[string]string) bool {
	for k, v := range f.Metadata {
		if got, ok := metadata[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// records is the view of sandboxes, also of those that have ended.
func (o *output) records() view[openapi.SandboxRecord] {
	return view[openapi.SandboxRecord]{
		name: func(s openapi.SandboxRecord) string { return s.SandboxID },
		columns: []column[openapi.SandboxRecord]{
			{name: "SANDBOX", text: func(s openapi.SandboxRecord) string { return s.SandboxID }},
			{name: "POOL", text: func(s openapi.SandboxRecord) string { return s.Pool }},
			{name: "PHASE", colour: true, text: func(s openapi.SandboxRecord) string { return string(s.Phase) }},
			{name: "AGE", ticks: true, text: func(s openapi.SandboxRecord) string { return span(o.now().Sub(s.ClaimedAt)) }},
			{name: "ENDS IN", ticks: true, text: func(s openapi.SandboxRecord) string {
				switch {
				case s.ReleasedAt != nil:
					return ""
				case s.EndAt == nil:
					return "never"
				}
				return until(o.now(), *s.EndAt)
			}},
			{name: "IDLE TIMEOUT", wide: true, text: func(s openapi.SandboxRecord) string { return optionalSpan(s.IdleTimeout) }},
			{name: "TEAM", wide: true, text: func(s openapi.SandboxRecord) string { return s.Team }},
			{name: "USER", wide: true, text: func(s openapi.SandboxRecord) string { return s.User }},
			{name: "POD", wide: true, text: func(s openapi.SandboxRecord) string { return s.PodName }},
			{name: "ADDRESS", wide: true, text: func(s openapi.SandboxRecord) string { return s.PodIP }},
			{name: "REASON", wide: true, text: func(s openapi.SandboxRecord) string { return s.Reason }},
			{name: "METADATA", wide: true, text: func(s openapi.SandboxRecord) string { return metadataText(s.Metadata) }},
			{name: "URL", text: func(s openapi.SandboxRecord) string { return s.URL }},
		},
	}
}

func optionalSpan(seconds float64) string {
	if seconds == 0 {
		return ""
	}
	return spanSeconds(seconds)
}

func metadataText(metadata map[string]string) string {
	all := make([]string, 0, len(metadata))
	for _, k := range slices.Sorted(maps.Keys(metadata)) {
		all = append(all, k+"="+metadata[k])
	}
	return strings.Join(all, ",")
}

type lsCommand struct {
	apiFlags
	formatFlags
	watchFlags
	filterFlags
	Phase []string `enum:"starting,running,fallingAsleep,asleep,waking,stopped,released,ended" default:"starting,running,fallingAsleep,asleep,waking,stopped" help:"Phases: starting, running, fallingAsleep, asleep, waking, stopped, released, ended. The default is all but the last two. The API remembers the last 10,000 ended sandboxes for 24 hours."`
}

// Run implements the command.
func (c *lsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	list := func() ([]openapi.SandboxRecord, error) { return c.list(ctx, t, c.Phase) }
	if c.Watch {
		changes, stop := c.changes(ctx, t)
		defer stop()
		return watch(ctx, o, c.formatFlags, c.watchFlags, o.records(), list, changes)
	}
	all, err := list()
	if err != nil {
		return err
	}
	return show(o, c.formatFlags, o.records(), all, all)
}

// changes returns a channel that has a value after an event, so that a short life is seen too. Without events,
// --interval alone decides. stop ends what fills the channel.
func (f *filterFlags) changes(ctx context.Context, t *target) (changes <-chan struct{}, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	noted := make(chan struct{}, 1)
	var reading sync.WaitGroup
	reading.Go(func() {
		for _, err := range t.api.Events(ctx, openapi.StreamEventsParams{Pool: nonEmpty(f.Pool), Team: nonEmpty(f.Team)}) {
			if err != nil {
				return
			}
			select {
			case noted <- struct{}{}:
			default: // a look is due already
			}
		}
	})
	return noted, func() { cancel(); reading.Wait() }
}

// idsArg are sandboxes.
type idsArg struct {
	IDs []string `arg:"" name:"sandbox" complete:"sandbox" help:"IDs of sandboxes."`
}

// each calls f for every ID, and returns the answers and what went wrong. The exit status is that of
// the last error.
func each[T any](ids []string, f func(id string) (T, error)) (all []T, err error) {
	for _, id := range ids {
		answer, failed := f(id)
		if failed != nil {
			code := cli.ExitCode(failed)
			err = cli.WithExitCode(code, errors.Join(err, fmt.Errorf("%s: %w", id, failed)))
			continue
		}
		all = append(all, answer)
	}
	return all, err
}

// single is a list's only entry, for formats that print an object.
func single[T any](asked []string, all []T) any {
	if len(asked) == 1 && len(all) == 1 {
		return all[0]
	}
	return all
}

type getCommand struct {
	apiFlags
	formatFlags
	idsArg
}

// Run implements the command.
func (c *getCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all, err := each(c.IDs, func(id string) (openapi.Sandbox, error) {
		s, err := call(ctx, t, func(ctx context.Context) (*openapi.Sandbox, error) { return t.api.Get(ctx, id) })
		if err != nil {
			return openapi.Sandbox{}, err
		}
		return *s, nil
	})
	return shown(err, len(all), func() error { return show(o, c.formatFlags, o.sandboxes(), all, single(c.IDs, all)) })
}

type killCommand struct {
	apiFlags
	IDs []string `arg:"" optional:"" name:"sandbox" complete:"sandbox" help:"IDs of sandboxes."`
	All bool     `help:"Release all sandboxes. Needs a filter or --yes."`
	Yes bool     `short:"y" help:"With --all: really all."`
	filterFlags
}

// Run implements the command.
func (c *killCommand) Run(ctx context.Context, o *output) error {
	switch {
	case c.All == (len(c.IDs) > 0):
		return usage("name sandboxes, or give --all")
	case !c.All && !c.empty():
		return usage("--pool, --team, --user and --metadata: need --all")
	case c.All && c.empty() && !c.Yes:
		return usage("--all: needs a filter such as --pool, or --yes for every sandbox that this key can see")
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	if c.All {
		all, err := c.list(ctx, t, nil)
		if err != nil {
			return err
		}
		for _, s := range all {
			c.IDs = append(c.IDs, s.SandboxID)
		}
	}
	_, err = each(c.IDs, func(id string) (none, error) {
		err := do(ctx, t, func(ctx context.Context) error { return t.api.Kill(ctx, id) })
		if err != nil && c.All && cli.ExitCode(err) == exitNotFound {
			return none{}, nil // it ended meanwhile
		}
		if err == nil {
			_, err = fmt.Fprintf(o.out, "%s released\n", id)
		}
		return none{}, err
	})
	return err
}

type none struct{}

func usage(format string, args ...any) error {
	return cli.WithExitCode(cli.ExitUsage, fmt.Errorf(format, args...))
}

type timeoutCommand struct {
	apiFlags
	ID      string        `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
	Timeout time.Duration `arg:"" help:"Time from now until the end, such as 30m."`
}

// Run implements the command.
func (c *timeoutCommand) Run(ctx context.Context, o *output) error {
	if c.Timeout < time.Second || c.Timeout%time.Second != 0 {
		return usage("timeout %v: must be whole seconds, 1s or more; berth kill ends a sandbox at once", c.Timeout)
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	if err := do(ctx, t, func(ctx context.Context) error { return t.api.SetTimeout(ctx, c.ID, c.Timeout) }); err != nil {
		return err
	}
	_, err = fmt.Fprintf(o.out, "%s ends in %v\n", c.ID, c.Timeout)
	return err
}

// networkFlags are what a sandbox may reach, within what its pool lets it reach.
type networkFlags struct {
	AllowOut []string `placeholder:"HOST" help:"What it may reach although --deny-out has it: host name, '*.example.com', IP address or CIDR. A name needs '--deny-out 0.0.0.0/0'. Can be repeated."`
	DenyOut  []string `placeholder:"CIDR" help:"What it may not reach unless --allow-out has it: IP address, CIDR, or 0.0.0.0/0 for everything. Can be repeated."`
	Rules    []byte   `type:"filecontent" placeholder:"FILE" help:"File with headers that the egress gateway sets, as JSON like the field network.rules of a claim, - for standard input. The sandbox never sees the values."`
}

// headers reads Rules; nil: there are none. An error has no value.
func (f *networkFlags) headers() (*openapi.NetworkRules, error) {
	if len(f.Rules) == 0 {
		return nil, nil
	}
	var rules openapi.NetworkRules
	if err := json.Unmarshal(f.Rules, &rules); err != nil {
		return nil, usage("--rules: it is not JSON of the form " +
			`{"api.example.com":[{"transform":{"headers":{"Authorization":"Bearer ..."}}}]}`)
	}
	return &rules, nil
}

type networkCommand struct {
	apiFlags
	ID string `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
	networkFlags
}

// networkWait is how much longer the call may take: it waits for the egress gateways for 10 s, and is repeated.
const networkWait = time.Minute

// Run implements the command.
func (c *networkCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	t.wait += networkWait
	headers, err := c.headers()
	if err != nil {
		return err
	}
	rules := openapi.SandboxNetworkUpdate{AllowOut: c.AllowOut, DenyOut: c.DenyOut, Rules: headers}
	if err := do(ctx, t, func(ctx context.Context) error { return t.api.SetNetwork(ctx, c.ID, rules) }); err != nil {
		return err
	}
	text := "may reach whatever its pool lets it reach"
	if len(c.AllowOut) > 0 || len(c.DenyOut) > 0 {
		text = fmt.Sprintf("denied %s, allowed %s", listed(c.DenyOut), listed(c.AllowOut))
	}
	if headers != nil {
		text += ", with headers for " + listed(slices.Sorted(maps.Keys(*headers)))
	}
	_, err = fmt.Fprintf(o.out, "%s %s\n", c.ID, text)
	return err
}

func listed(all []string) string { return cmp.Or(strings.Join(all, ","), "nothing") }

type pauseCommand struct {
	apiFlags
	idsArg
	Stop bool `help:"Stop the sandboxes: they keep their files, and lose their pods, processes and memory. Those that are asleep are stopped, too. It takes as long as their files are archived."`
}

// Run implements the command.
func (c *pauseCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	pause, state := t.api.Pause, "asleep"
	if c.Stop {
		pause, state = t.api.Stop, "stopped"
		t.wait += snapshotWait
	}
	_, err = each(c.IDs, func(id string) (none, error) {
		err := do(ctx, t, func(ctx context.Context) error { return pause(ctx, id) })
		if err == nil {
			_, err = fmt.Fprintf(o.out, "%s %s\n", id, state)
		}
		return none{}, err
	})
	return err
}

type resumeCommand struct {
	apiFlags
	idsArg
	Timeout time.Duration `default:"5m" help:"Time from now until the end."`
}

// Run implements the command.
func (c *resumeCommand) Run(ctx context.Context, o *output) error {
	if c.Timeout < time.Second || c.Timeout%time.Second != 0 {
		return usage("--timeout %v: must be whole seconds, 1s or more", c.Timeout)
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	t.wait += wakeWait
	_, err = each(c.IDs, func(id string) (none, error) {
		err := do(ctx, t, func(ctx context.Context) error {
			_, err := t.api.Resume(ctx, id, c.Timeout)
			return err
		})
		if err == nil {
			_, err = fmt.Fprintf(o.out, "%s awake\n", id)
		}
		return none{}, err
	})
	return err
}

type keepaliveCommand struct {
	apiFlags
	idsArg
}

// Run implements the command.
func (c *keepaliveCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	_, err = each(c.IDs, func(id string) (none, error) {
		err := do(ctx, t, func(ctx context.Context) error { return t.api.KeepAlive(ctx, id) })
		if err == nil {
			_, err = fmt.Fprintf(o.out, "%s used\n", id)
		}
		return none{}, err
	})
	return err
}

// readOnce gets the sandbox of a command that sends requests to it.
func readOnce(ctx context.Context, t *target, id string) (*openapi.Sandbox, error) {
	return call(ctx, t, func(ctx context.Context) (*openapi.Sandbox, error) { return t.api.Get(ctx, id) })
}

// addressOf returns the address of a port, or a usage error.
func addressOf(s *openapi.Sandbox, port uint16, path string) (string, error) {
	text, err := client.URL(s, int(port))
	if err != nil {
		return "", err
	}
	base, err := url.Parse(text)
	if err != nil {
		return "", err
	}
	reference, err := url.Parse(cmp.Or(path, "/"))
	if err != nil || reference.Host != "" || !strings.HasPrefix(reference.Path, "/") {
		return "", usage("%q: must be a path that begins with /", path)
	}
	base.Path, base.RawPath, base.RawQuery = reference.Path, reference.RawPath, reference.RawQuery
	base.Fragment = reference.Fragment
	return base.String(), nil
}
