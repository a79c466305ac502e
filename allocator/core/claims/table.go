package claims

import (
	"maps"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/lines"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// Config is fixed for a term.
type Config struct {
	// MaxWaiting bounds the callers whose claims wait for a pod of one pool, and the callers that
	// wait for one sandbox with one idempotency key. Each of n teams that wait for a pod of one
	// pool can have 1/n of them.
	MaxWaiting int
	// NewID returns a sandbox ID that was never used.
	NewID func() string
	// Quarantine is how long no pod is handed out yet, because routers may serve routes of an earlier journal.
	Quarantine func(now time.Duration) time.Duration
}

// Table has the claims that have no answer yet, the keys, and the limits of the teams.
type Table struct {
	*step.Current
	// The claims, their callers and their keys. Add, Drop, Grant, Await, Abandon, Expire, Keep, Free and Recover are its
	// methods, and change nothing else.
	*Ledger
	cfg       Config
	outbox    *fact.Outbox
	pods      *pods.Table
	sandboxes *sandboxes.Table
	pools     *pools.Table
	limits    *teams.Ledger
	// pressure: journaled changes reach the Sandbox objects too slowly. closing: this leader is about to end.
	pressure, closing bool

	lines   map[fact.PoolKey]*lines.Line[request] // of the pools that had a claim
	filling map[fact.PoolKey]*Claim               // those that collect pods for their batch
	taken   map[fact.PodKey]*Claim                // by the pods that they have, until their facts are durable
	// configuring has the claims of the sandboxes that are durable and not granted, by ID: their agents are being
	// configured.
	configuring map[string]*Claim
	decided     []string // grants whose callers may be answered
	// needs is how many sandboxes of a batch must start, by grant: of the batches of this term that have neither
	// succeeded nor failed.
	needs map[string]int
	left  map[share]leftover // see leftBy
	// revivals are the claims for stopped sandboxes, by the tokens of their only callers. tokens counts these.
	revivals map[uint64]*Claim
	tokens   uint64
}

// share is what a team has of a pool.
type share struct {
	pool fact.PoolKey
	team string
}

// leftover are the pods that claims have left, until then on the boot clock.
type leftover struct {
	pods  int
	until time.Duration
}

// Ledger has the callers and the keys. It is made first, because the sandboxes ask it whether a key holds.
type Ledger = lines.Ledger[request]

// NewLedger returns an empty ledger.
func NewLedger() *Ledger { return lines.New[request]() }

// New returns an empty table.
func New(current *step.Current, cfg Config, outbox *fact.Outbox, ledger *Ledger, pods *pods.Table, sandboxes *sandboxes.Table, pools *pools.Table) *Table {
	return &Table{
		Current: current, Ledger: ledger, cfg: cfg, outbox: outbox, pods: pods, sandboxes: sandboxes, pools: pools, limits: teams.New(),
		lines: map[fact.PoolKey]*lines.Line[request]{}, filling: map[fact.PoolKey]*Claim{}, taken: map[fact.PodKey]*Claim{},
		configuring: map[string]*Claim{}, needs: map[string]int{}, left: map[share]leftover{}, revivals: map[uint64]*Claim{},
	}
}

// line has the claims of a pool that wait.
func (t *Table) line(key fact.PoolKey) *lines.Line[request] {
	if t.lines[key] == nil {
		t.lines[key] = lines.NewLine[request]()
	}
	return t.lines[key]
}

// Waiting is how many callers wait for pods of a pool.
func (t *Table) Waiting(key fact.PoolKey) int {
	if line := t.lines[key]; line != nil {
		return line.Callers()
	}
	return 0
}

// Lacking is how many pods of a pool the claims that wait still need.
func (t *Table) Lacking(key fact.PoolKey) (lacking int) {
	if line := t.lines[key]; line != nil {
		lacking = line.Pods()
	}
	if filling := t.filling[key]; filling != nil {
		lacking -= len(filling.Request.pods)
	}
	return lacking
}

// DropLine forgets the line of a pool that is not known any more.
func (t *Table) DropLine(key fact.PoolKey) { delete(t.lines, key) }

// HasPod returns the claim that has a pod, until its facts are durable; nil: none has.
func (t *Table) HasPod(pod fact.PodKey) *Claim { return t.taken[pod] }

// AnswerDecided answers the callers of the grants that were decided since it was called last. It reports whether there
// were any. Routers have the routes of the sandboxes by then.
func (t *Table) AnswerDecided() bool {
	grants := t.decided
	t.decided = nil
	t.Answer(grants...)
	return len(grants) > 0
}

// Pressure has new claims refused while it is on.
func (t *Table) Pressure(on bool) { t.pressure = on }

// UnderPressure reports whether new claims are refused because the Sandbox objects lag behind.
func (t *Table) UnderPressure() bool { return t.pressure }

// Limit replaces the limits of the teams.
func (t *Table) Limit(s teams.Settings) { t.limits.Set(s, t.Now.Boot) }

// Close ends all waits: this leader is about to end.
func (t *Table) Close() {
	t.closing = true
	for pool := range t.pools.All() {
		pool.Touch()
	}
	t.Answer(t.Awaited()...)
}

// Closing reports whether this leader is about to end.
func (t *Table) Closing() bool { return t.closing }

// Started notes that a sandbox runs. Its callers are answered by AnswerDecided.
func (t *Table) Started(sb *sandboxes.Sandbox) { t.decided = append(t.decided, sb.Grant()) }

// Released notes that the release of a sandbox is durable.
func (t *Table) Released(sb *sandboxes.Sandbox) {
	if !sb.HasPod() {
		t.dropRevival(sb)
	}
	if sb.Keyed() {
		t.Keep(KeyOf(&sb.Binding), sb.Grant(), sb.ID, sb.ReleasedSince())
	} else {
		t.Free(KeyOf(&sb.Binding), sb.Grant())
	}
	t.adopt(sb.Grant())
}

// Recovered enters the key of a sandbox of an earlier term.
func (t *Table) Recovered(sb *sandboxes.Sandbox) {
	if sb.Over() && !sb.Keyed() {
		return
	}
	t.Recover(KeyOf(&sb.Binding), sb.RequestHash, sb.Grant())
	if sb.Over() {
		t.Keep(KeyOf(&sb.Binding), sb.Grant(), sb.ID, sb.ReleasedSince())
	}
}

// TickPool acts on what is due in the line of a pool.
func (t *Table) TickPool(pool *pools.Pool) {
	line, filling := t.line(pool.Key), t.filling[pool.Key]
	if filling != nil && filling.Late(t.Now.Boot) && len(filling.Request.pods) >= filling.Request.atLeast {
		filling.Request.ends = true
		t.Serve(pool)
	}
	late, dropped := t.Expire(line, t.Now.Boot)
	for _, x := range late {
		t.refused(t.refusal(pool, x.Token, step.PoolEmpty))
	}
	for _, cl := range dropped {
		t.dropped(cl)
	}
}

// Tick answers the callers whose wait for a start is over, and frees the keys that have held for keep after the end of
// their sandboxes.
func (t *Table) Tick(keep time.Duration) {
	t.Answer(t.Awaited()...)
	for _, id := range t.DropKeys(t.Now.Boot - keep) {
		t.sandboxes.LetGo(t.sandboxes.Get(id))
	}
	maps.DeleteFunc(t.left, func(_ share, l leftover) bool { return l.until <= t.Now.Boot })
}

// Use is what a team has of its limits.
type Use struct{ Sandboxes, Waiting int }

// TeamStatus is what one team may have, and what it has of that.
type TeamStatus struct {
	Team string
	Use
	Limits teams.Limits
}

// Teams returns those of these teams, of the teams whose limits are set by name and of the teams with live sandboxes that
// come first by name, and the number of the others.
func (t *Table) Teams(also []string, most int) (all []TeamStatus, others int) {
	names := map[string]bool{}
	for _, team := range also {
		names[team] = true
	}
	settings := t.limits.Settings()
	for team := range settings.Teams {
		names[team] = true
	}
	t.sandboxes.Live().Teams(func(team string) { names[team] = true })
	sorted := slices.Sorted(maps.Keys(names))
	n := min(len(sorted), most)
	for _, team := range sorted[:n] {
		r := t.usage(team)
		all = append(all, TeamStatus{team, Use{Sandboxes: r.Used, Waiting: r.Waiting}, settings.Of(team)})
	}
	return all, len(sorted) - n
}

// NamedTeams returns what the teams have whose limits are set by name.
func (t *Table) NamedTeams() map[string]Use {
	all := map[string]Use{}
	for team := range t.limits.Settings().Teams {
		r := t.usage(team)
		all[team] = Use{Sandboxes: r.Used, Waiting: r.Waiting}
	}
	return all
}
