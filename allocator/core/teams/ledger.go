package teams

import (
	"fmt"
	"math"
	"time"
)

// Limits are those of one team. 0: none.
type Limits struct {
	MaxSandboxes    int
	MaxWaiting      int
	ClaimsPerSecond float64
}

// Settings are the limits of all teams.
type Settings struct {
	// Default is for teams that are not in Teams.
	Default Limits
	Teams   map[string]Limits
}

// Of returns the limits of a team.
func (s Settings) Of(team string) Limits {
	if l, ok := s.Teams[team]; ok {
		return l
	}
	return s.Default
}

// Limit names a limit as the settings do.
type Limit string

// The limits.
const (
	MaxSandboxes    Limit = "maxSandboxes"
	MaxWaiting      Limit = "maxWaiting"
	ClaimsPerSecond Limit = "claimsPerSecond"
)

// Excess is why a claim is refused. Its zero value: it is not.
type Excess struct {
	Team  string
	Limit Limit
	Value float64
	// Used is what the team has of MaxSandboxes or MaxWaiting.
	Used int
	// Wait is after how long ClaimsPerSecond admits the claim.
	Wait time.Duration
}

// Request is a claim of a team.
type Request struct {
	Team string
	// Sandboxes is how many it asks for. 0: the call joins a claim that waits, which has paid for them.
	Sandboxes int
	// Waits: it has to wait for a pod.
	Waits bool
	// Used are the sandboxes of the team that are not released, and those that its other claims ask
	// for. Waiting is how many calls of the team wait.
	Used, Waiting int
}

// Ledger has the limits, and a bucket for each team that is not full.
type Ledger struct {
	settings Settings
	buckets  map[string]bucket
}

// bucket has tokens; a negative number is a debt. The rate and the size are those of the limit.
type bucket struct {
	tokens float64
	at     time.Duration
}

// New returns a ledger without limits.
func New() *Ledger { return &Ledger{buckets: map[string]bucket{}} }

// Set replaces all limits. What teams have used of a rate stays.
func (l *Ledger) Set(s Settings, now time.Duration) {
	for team := range l.buckets {
		b := l.bucket(team, now) // at the old rate
		if rate := s.Of(team).ClaimsPerSecond; rate == 0 || b.tokens >= size(rate) {
			delete(l.buckets, team)
		} else {
			l.buckets[team] = b
		}
	}
	l.settings = s
}

// Settings returns the limits.
func (l *Ledger) Settings() Settings { return l.settings }

// Admit takes the tokens of a claim, or says which limit refuses it.
func (l *Ledger) Admit(r Request, now time.Duration) Excess {
	excess := l.Excess(r, now)
	if l.settings.Of(r.Team).ClaimsPerSecond > 0 && r.Sandboxes > 0 && excess == (Excess{}) {
		b := l.bucket(r.Team, now)
		b.tokens -= float64(r.Sandboxes)
		l.buckets[r.Team] = b
	}
	return excess
}

// Excess says which limit refuses a claim. It takes no token.
func (l *Ledger) Excess(r Request, now time.Duration) Excess {
	limits := l.settings.Of(r.Team)
	switch rate := limits.ClaimsPerSecond; {
	case r.Sandboxes > 0 && limits.MaxSandboxes > 0 && r.Used+r.Sandboxes > limits.MaxSandboxes:
		return Excess{Team: r.Team, Limit: MaxSandboxes, Value: float64(limits.MaxSandboxes), Used: r.Used}
	case r.Waits && limits.MaxWaiting > 0 && r.Waiting >= limits.MaxWaiting:
		return Excess{Team: r.Team, Limit: MaxWaiting, Value: float64(limits.MaxWaiting), Used: r.Waiting}
	case r.Sandboxes > 0 && rate > 0:
		b := l.bucket(r.Team, now)
		if missing := min(float64(r.Sandboxes), size(rate)) - b.tokens; missing > 1e-9 {
			wait := time.Duration(math.Ceil(missing / rate * float64(time.Second)))
			return Excess{Team: r.Team, Limit: ClaimsPerSecond, Value: rate, Wait: wait}
		}
	}
	return Excess{}
}

// size is how many tokens a bucket holds.
func size(rate float64) float64 { return max(1, rate) }

// bucket returns that of a team as it is now.
func (l *Ledger) bucket(team string, now time.Duration) bucket {
	rate := l.settings.Of(team).ClaimsPerSecond
	b, ok := l.buckets[team]
	if !ok {
		return bucket{size(rate), now}
	}
	return bucket{min(size(rate), b.tokens+rate*(now-b.at).Seconds()), now}
}

// Check returns the first contradiction. It is for tests.
func (l *Ledger) Check(now time.Duration) error {
	for team, b := range l.buckets {
		if rate := l.settings.Of(team).ClaimsPerSecond; rate <= 0 || b.tokens > size(rate) || b.at > now {
			return fmt.Errorf("teams: %q has the bucket %+v at %v, its rate is %v", team, b, now, rate)
		}
	}
	return nil
}
