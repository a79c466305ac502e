package soak

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/bootclock"
)

// outgoing is a message that a sandbox has sent to a host: a request of its own, or one in a tunnel.
type outgoing struct {
	owner  string // the sandbox whose credential it had
	host   string
	began  time.Duration
	tunnel bool
	away   bool // it was sent while no router of the egress gateway ran
	// over is that the rules had ceased to allow it. tempted, that another sandbox had the address by then.
	over, tempted bool
}

// arrival is a message that has reached an origin.
type arrival struct {
	message    int    // of sent
	host       string // as the origin saw it
	connection uint64 // of the origin
	at         time.Duration
}

// permission is that the rules of a sandbox allow a host. No host is allowed to two sandboxes, or twice.
type permission struct {
	owner string
	until time.Duration // when a call was answered that ends it. 0: not yet
}

// outgoings are all messages of a test. Its methods may be called by several goroutines.
type outgoings struct {
	mu       sync.Mutex
	allowed  map[string]*permission // by host
	sent     []outgoing
	arrived  []arrival
	holders  map[string][]string // the sandboxes that have had an address, in order
	reused   int
	changes  int           // of rules
	vanished time.Duration // when the router had ended
	returned time.Duration // when it was about to start again
}

func newOutgoings() *outgoings {
	return &outgoings{allowed: map[string]*permission{}, holders: map[string][]string{}}
}

// allow notes that a sandbox is about to be allowed a host.
func (o *outgoings) allow(owner, host string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.allowed[host] = &permission{owner: owner}
}

// changed notes that a call was answered that takes away a host.
func (o *outgoings) changed(host string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changes++
	o.allowed[host].until = bootclock.Now()
}

// ended notes that a sandbox has ended, for all egress routers.
func (o *outgoings) ended(owner string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end(owner)
}

func (o *outgoings) end(owner string) {
	for _, p := range o.allowed {
		if p.owner == owner && p.until == 0 {
			p.until = bootclock.Now()
		}
	}
}

// holds notes that a sandbox was answered that has an address. So the one before has ended.
func (o *outgoings) holds(owner, addr string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if before := o.holders[addr]; len(before) > 0 {
		o.reused++
		o.end(before[len(before)-1])
	}
	o.holders[addr] = append(o.holders[addr], owner)
}

// send notes a message that is about to be sent, and returns its number.
func (o *outgoings) send(owner, addr, host string, tunnel bool) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := outgoing{owner: owner, host: host, tunnel: tunnel, began: bootclock.Now()}
	m.away = o.vanished != 0 && o.returned == 0
	if p := o.allowed[host]; p.owner == owner && p.until != 0 {
		all := o.holders[addr]
		m.over, m.tempted = true, all[len(all)-1] != owner
	}
	o.sent = append(o.sent, m)
	return len(o.sent) - 1
}

// arrive notes a message at an origin.
func (o *outgoings) arrive(a arrival) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.at = bootclock.Now()
	o.arrived = append(o.arrived, a)
}

// away notes that the router has ended, and back that it is about to start again.
func (o *outgoings) away() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.vanished = bootclock.Now()
}

func (o *outgoings) back() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.returned = bootclock.Now()
}

// tunnelLoss is how long Envoy may take to notice that its router has ended, on a busy machine.
const tunnelLoss = time.Second

// judge returns what must not have arrived.
func (o *outgoings) judge() (violations []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	owners := map[uint64]string{} // of connections
	for _, a := range o.arrived {
		if a.message < 0 || a.message >= len(o.sent) {
			violations = append(violations, fmt.Sprintf("message %d arrived, and was never sent", a.message))
			continue
		}
		m := o.sent[a.message]
		wrong := func(what string, args ...any) {
			what = fmt.Sprintf(what, args...)
			violations = append(violations,
				fmt.Sprintf("message %d of sandbox %s for %s: %s", a.message, m.owner, m.host, what))
		}
		if a.host != m.host {
			wrong("it arrived as one for %s", a.host)
		}
		switch p := o.allowed[m.host]; {
		case p == nil || p.owner != m.owner:
			wrong("it left under the rules of another sandbox")
		case p.until != 0 && m.began > p.until:
			wrong("it began %v after its permission had ended", m.began-p.until)
		}
		left := o.vanished
		if m.tunnel {
			left += tunnelLoss
		}
		// Envoy has requests wait for a router that starts again, so one may arrive when it is back.
		if o.vanished != 0 && m.began > left && (o.returned == 0 || a.at < o.returned) {
			wrong("it left while no router ran")
		}
		if owner, known := owners[a.connection]; known && owner != m.owner {
			wrong("its connection to the origin has served sandbox %s", owner)
		}
		owners[a.connection] = m.owner
	}
	return violations
}

// lacks says what has not happened often enough for the verdict to mean anything.
func (o *outgoings) lacks() (all []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	least := func(what string, count, want int) {
		if count < want {
			all = append(all, fmt.Sprintf("nothing is proven: %s: %d, expected %d at least", what, count, want))
		}
	}
	var over, tempted, foreign, away, plain, tunnelled, after int
	for _, m := range o.sent {
		over += one(m.over)
		tempted += one(m.tempted)
		foreign += one(o.allowed[m.host].owner != m.owner)
		away += one(m.away)
	}
	for _, a := range o.arrived {
		m := o.sent[a.message]
		tunnelled += one(m.tunnel)
		plain += one(!m.tunnel)
		after += one(o.returned != 0 && m.began > o.returned)
	}
	least("plain requests that arrived", plain, 200)
	least("messages that arrived through tunnels", tunnelled, 200)
	least("addresses used again", o.reused, 15)
	least("changes of rules", o.changes, 20)
	least("messages after their permission had ended", over, 200)
	least("messages from an address that another sandbox had by then", tempted, 50)
	least("messages for a host of another sandbox", foreign, 50)
	least("messages while no router ran", away, 10)
	least("messages that arrived after the router came back", after, 50)
	return all
}

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}

// The judge finds each of these in what is right otherwise.
func TestJudgeFindsEveryMessageThatMustNotLeave(t *testing.T) {
	for want, change := range map[string]func(*outgoings){
		"": func(*outgoings) {},
		"message 2 of sandbox a for a1: it left under the rules of another sandbox": func(o *outgoings) {
			o.allowed["a1"].owner = "b"
		},
		"message 1 of sandbox a for a0: it began 1ns after its permission had ended": func(o *outgoings) {
			o.allowed["a0"].until = o.sent[1].began - 1
		},
		"message 0 of sandbox a for a0: it arrived as one for b0": func(o *outgoings) { o.arrived[0].host = "b0" },
		"message 9 arrived, and was never sent": func(o *outgoings) {
			o.arrived = append(o.arrived, arrival{message: 9})
		},
		"message 3 of sandbox b for b0: its connection to the origin has served sandbox a": func(o *outgoings) {
			o.arrived[3].connection = 1
		},
		"message 2 of sandbox a for a1: it left while no router ran": func(o *outgoings) {
			o.vanished, o.returned = o.sent[2].began-1, o.arrived[2].at+1
		},
		"message 4 of sandbox b for b0: it left while no router ran": func(o *outgoings) { o.arrived[4].at = o.returned - 1 },
		"message 3 of sandbox b for b0: it left while no router ran": func(o *outgoings) {
			o.sent[3].began = o.sent[2].began + time.Hour
			o.vanished, o.returned = o.sent[3].began-tunnelLoss-1, 0
		},
	} {
		o := newOutgoings()
		o.allow("a", "a0")
		o.holds("a", "127.0.0.2")
		arrive := func(message int, host string, connection uint64) {
			o.arrive(arrival{message: message, host: host, connection: connection})
		}
		arrive(o.send("a", "127.0.0.2", "a0", false), "a0", 1)
		arrive(o.send("a", "127.0.0.2", "a0", true), "a0", 1)
		o.allow("a", "a1")
		o.changed("a0")
		arrive(o.send("a", "127.0.0.2", "a1", false), "a1", 1)
		o.ended("a")
		o.allow("b", "b0")
		o.holds("b", "127.0.0.2")
		o.away()
		arrive(o.send("b", "127.0.0.2", "b0", true), "b0", 2)
		waits := o.send("b", "127.0.0.2", "b0", false)
		o.back()
		arrive(waits, "b0", 2)
		o.send("a", "127.0.0.2", "a0", false) // is refused
		require.Equal(t, 1, o.reused)
		require.True(t, o.sent[5].tempted)
		change(o)
		found := o.judge()
		if want == "" {
			require.Empty(t, found)
			require.Len(t, o.lacks(), 9)
			continue
		}
		require.True(t, slices.Contains(found, want), "%s: %s", want, found)
	}
}
