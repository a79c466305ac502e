package core

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/routecache"
)

// The files of testdata/scenarios tell, line by line, what happens in the world of the
// model test and what must be so then. After each line everything goes on by itself,
// but for time and for what a line holds back. All that the model test judges in its
// histories is judged here too. The variables setup and sentences have every kind of line.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/scenarios/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) { runScenario(t, file) })
	}
}

func runScenario(t *testing.T, file string) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := &scenario{names: map[string]string{}, tokens: map[string]uint64{}}
	at := 0
	s.tb = &scenarioT{T: t, where: func() string { return fmt.Sprintf("%s:%d", filepath.Base(file), at) }}
	s.w = newWorld(s.tb, func(int) int { return 0 })
	s.w.held.envoys = map[int]bool{}
	defer s.w.endAll()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		at++
		line, _, _ := strings.Cut(lines.Text(), "#")
		if line = strings.TrimSpace(line); line != "" {
			t.Logf("%s: %s", filepath.Base(file), line)
			s.do(line)
		}
	}
}

// scenarioT says which line it was.
type scenarioT struct {
	*testing.T
	where func() string
}

func (t *scenarioT) Fatalf(format string, args ...any) {
	t.Helper()
	t.T.Fatalf("%s: %s", t.where(), fmt.Sprintf(format, args...))
}

func (t *scenarioT) Fatal(args ...any) {
	t.Helper()
	t.T.Fatalf("%s: %s", t.where(), fmt.Sprint(args...))
}

type scenario struct {
	tb     *scenarioT
	w      *world
	names  map[string]string // of sandboxes -> their IDs
	tokens map[string]uint64 // of claims
	begun  bool
}

// sentence is a kind of line. What stands in brackets is handed to do.
type sentence struct {
	pattern *regexp.Regexp
	do      func(s *scenario, args []string)
}

func says(pattern string, do func(s *scenario, args []string)) sentence {
	return sentence{regexp.MustCompile("^" + pattern + "$"), do}
}

// setup are the lines that come before anything happens.
var setup = []sentence{
	says(`pool (\w+) keeps (\d+) warm`, func(s *scenario, a []string) {
		s.w.addPool(Pool{Key: PoolKey{Namespace: "ns", Name: a[0]}, Warm: number(a[1])})
	}),
	says(`pool (\w+) keeps (\d+) warm, (\d+) pods at most`, func(s *scenario, a []string) {
		s.w.addPool(Pool{Key: PoolKey{Namespace: "ns", Name: a[0]}, Warm: number(a[1]), MaxPods: number(a[2])})
	}),
}

var sentences = []sentence{
	says(`router (\w+) starts beside Envoy (\d)`, func(s *scenario, a []string) {
		s.w.addRouter(number(a[1])).id = a[0]
	}),

	// What holds back, and lets go.
	says(`(\w+) hears nothing`, func(s *scenario, a []string) { s.router(a[0]).deaf = true }),
	says(`(\w+) hears again`, func(s *scenario, a []string) { s.router(a[0]).deaf = false }),
	says(`nothing that (\w+) says arrives`, func(s *scenario, a []string) { s.router(a[0]).mute = true }),
	says(`what (\w+) says arrives again`, func(s *scenario, a []string) { s.router(a[0]).mute = false }),
	says(`(\w+) is cut off`, func(s *scenario, a []string) {
		r := s.router(a[0])
		r.away = true
		s.w.leave(r)
	}),
	says(`(\w+) has a connection again`, func(s *scenario, a []string) { s.router(a[0]).away = false }),
	says(`the journal stands still`, func(s *scenario, _ []string) { s.w.held.journal = true }),
	says(`the journal goes on`, func(s *scenario, _ []string) { s.w.held.journal = false }),
	says(`writes to the API server stand still`, func(s *scenario, _ []string) { s.w.held.writes = true }),
	says(`writes to the API server go on`, func(s *scenario, _ []string) { s.w.held.writes = false }),
	says(`the watch of pods lags`, func(s *scenario, _ []string) { s.w.held.watch = true }),
	says(`the watch of pods goes on`, func(s *scenario, _ []string) { s.w.held.watch = false }),
	says(`pods take long to end`, func(s *scenario, _ []string) { s.w.held.removals = true }),
	says(`pods end`, func(s *scenario, _ []string) { s.w.held.removals = false }),
	says(`Envoy (\d) stands still`, func(s *scenario, a []string) { s.w.held.envoys[number(a[0])] = true }),
	says(`Envoy (\d) goes on`, func(s *scenario, a []string) { s.w.held.envoys[number(a[0])] = false }),

	// What happens.
	says(`(\w+) is claimed from (\w+)`, func(s *scenario, a []string) {
		s.claim(a[0], a[1])
		s.finished(a[0])
	}),
	says(`(\w+) is asked for from (\w+)`, func(s *scenario, a []string) { s.claim(a[0], a[1]) }),
	says(`(\w+) is given out`, func(s *scenario, a []string) { s.finished(a[0]) }),
	says(`(\w+) is released`, func(s *scenario, a []string) {
		id := s.id(a[0])
		token := s.w.token()
		s.w.releases[token], s.w.asked[id] = id, true
		s.w.step(Release{Scope: everyTeam, Token: token, ID: id, Reason: fact.ReasonKilled})
	}),
	says(`the pod of (\w+) is deleted`, func(s *scenario, a []string) {
		s.w.write(s.pod(a[0]), func(p *Pod) { p.Deleting = true })
	}),
	says(`the pod of (\w+) vanishes`, func(s *scenario, a []string) { s.w.remove(s.pod(a[0])) }),
	says(`the pod of (\w+) gets another address`, func(s *scenario, a []string) {
		p := s.pod(a[0])
		p.moved = true
		s.w.write(p, func(p *Pod) { p.IP = s.w.address() })
	}),
	says(`the container of (\w+) restarts`, func(s *scenario, a []string) {
		s.w.write(s.pod(a[0]), func(p *Pod) { p.Restarts++ })
	}),
	says(`the next pod gets the address of (\w+)`, func(s *scenario, a []string) {
		s.w.nextAddress = s.w.disk.sandboxes[s.id(a[0])].IP
	}),
	says(`a user writes on the object of (\w+) that it is on an idle pod`, func(s *scenario, a []string) {
		i := slices.IndexFunc(s.w.pods, unused)
		if i < 0 {
			s.tb.Fatal("there is no idle pod")
		}
		s.w.tamper(s.id(a[0]), s.w.pods[i])
	}),
	says(`the leader changes`, func(s *scenario, _ []string) { s.w.changeLeader() }),
	says(`the leader that was deposed works on`, func(s *scenario, _ []string) {
		for range 10 {
			s.w.oldWorks()
		}
	}),
	says(`(\w+) dies`, func(s *scenario, a []string) { s.w.die(s.router(a[0])) }),
	says(`(\w+) stops`, func(s *scenario, a []string) { s.w.stopRouter(s.router(a[0])) }),
	says(`(\w+) finds (\w+) dead`, func(s *scenario, a []string) {
		if s.router(a[0]).envoy != s.router(a[1]).envoy || !s.router(a[1]).dead {
			s.tb.Fatalf("%s cannot take the lock of %s", a[0], a[1])
		}
		s.w.step(SessionDead{Session: a[1], By: a[0], Gateway: s.router(a[0]).gateway})
	}),
	says(`(\w+) has forgotten (\w+)`, func(s *scenario, a []string) { // for want of room
		r := s.router(a[0])
		r.cache.Resolve(s.id(a[1]), routecache.Answer{Status: routecache.Unknown})
		r.entries, r.small = r.known(), true
		s.w.sleep(time.Second) // until it may ask again
	}),

	// What must be so.
	says(`a request for (\w+) at (\w+) is (.+)`, func(s *scenario, a []string) {
		before := len(s.w.requests)
		r, id := s.router(a[1]), s.id(a[0])
		answer, err := r.cache.Lookup(over, sandboxid.MustKey(id))
		got := answer.Status.String()
		switch {
		case err != nil && !r.cache.Fresh():
			got = "refused: not fresh"
		case err != nil:
			got = "asked about"
		case answer.Status == routecache.Routable:
			got = "refused"
			if s.w.request(r, id); len(s.w.requests) > before {
				got = "admitted"
			}
		default:
			got = "refused: " + got
		}
		s.want("a request", a[2], got)
	}),
	says(`(\w+) runs`, func(s *scenario, a []string) {
		s.want("the reason that "+a[0]+" ended for", "", s.sandbox(a[0]).Reason)
	}),
	says(`(\w+) has ended: (\w+)`, func(s *scenario, a []string) {
		s.want("the reason that "+a[0]+" ended for", a[1], s.sandbox(a[0]).Reason)
	}),
	says(`(\w+) waits`, func(s *scenario, a []string) {
		_, waits := s.w.claims[s.tokens[a[0]]]
		s.want(a[0]+" waits", "true", strconv.FormatBool(waits))
	}),
	says(`the fence of (\w+) waits for (.+)`, func(s *scenario, a []string) {
		var waiting []string
		fences, id := s.w.core.fences, s.sandbox(a[0]).ID
		if _, _, ok := fences.Began(id); !ok {
			s.tb.Fatalf("%s has no fence", a[0])
		} else if !fences.Complete(id) {
			for router := range fences.Waiting(id) {
				waiting = append(waiting, router)
			}
			slices.Sort(waiting)
			if len(waiting) == 0 {
				waiting = []string{"the window"}
			}
		}
		s.want("what the fence of "+a[0]+" waits for", a[1], strings.Join(waiting, " and "))
	}),
	says(`the fence of (\w+) is complete`, func(s *scenario, a []string) {
		complete := s.w.core.fences.Complete(s.sandbox(a[0]).ID)
		s.want("the fence of "+a[0]+" is complete", "true", strconv.FormatBool(complete))
	}),
	says(`the pod of (\w+) is (there|gone)`, func(s *scenario, a []string) {
		is := "gone"
		if s.pod(a[0]).exists {
			is = "there"
		}
		s.want("the pod of "+a[0], a[1], is)
	}),
	says(`(\w+) (has|has not) the address of (\w+)`, func(s *scenario, a []string) {
		has := "has not"
		if s.sandbox(a[0]).IP == s.w.disk.sandboxes[s.id(a[2])].IP {
			has = "has"
		}
		s.want(a[0]+": the address of "+a[2], a[1], has)
	}),
	says(`pool (\w+) has (\d+) warm`, func(s *scenario, a []string) {
		counts, _ := s.w.core.View().Counts(PoolKey{Namespace: "ns", Name: a[0]})
		s.want("warm pods", a[1], strconv.Itoa(counts.Warm))
	}),
}

func (s *scenario) do(line string) {
	for _, k := range setup {
		if m := k.pattern.FindStringSubmatch(line); m != nil && !s.begun {
			k.do(s, m[1:])
			return
		}
	}
	if !s.begun {
		s.begun = true
		s.w.lead()
		s.goOn()
	}
	if m := regexp.MustCompile(`^(\d+)( more)? seconds? pass(?:es)?$`).FindStringSubmatch(line); m != nil {
		s.pass(time.Duration(number(m[1])) * time.Second)
		return
	}
	for _, k := range sentences {
		if m := k.pattern.FindStringSubmatch(line); m != nil {
			k.do(s, m[1:])
			s.goOn()
			return
		}
	}
	s.tb.Fatalf("no such line: %s", line)
}

// goOn lets everything happen that needs no time and is not held back.
func (s *scenario) goOn() {
	s.ping()
	s.w.rest()
	s.w.check()
}

// pass lets time pass, second by second.
func (s *scenario) pass(d time.Duration) {
	for ; d > 0; d -= time.Second {
		s.w.advance(time.Second)
		s.goOn()
	}
}

func (s *scenario) ping() {
	for _, r := range s.w.routers {
		if connected(r) && r.joined {
			s.w.ping(r)
		}
	}
}

func (s *scenario) want(what, want, got string) {
	s.tb.Helper()
	if want != got {
		s.tb.Fatalf("%s: expected %q, it is %q", what, want, got)
	}
}

func (s *scenario) claim(name, pool string) {
	token := s.w.token()
	s.tokens[name] = token
	s.w.claims[token] = &simClaim{}
	s.w.step(Claim{Token: token, Pool: PoolKey{Namespace: "ns", Name: pool}, Wait: time.Hour})
	s.goOn()
}

// finished gives a claim's sandbox its name.
func (s *scenario) finished(name string) {
	id, ok := s.w.given[s.tokens[name]]
	if !ok {
		s.tb.Fatalf("%s is not given out", name)
	}
	s.names[name] = id
}

func (s *scenario) id(name string) string {
	id, ok := s.names[name]
	if !ok {
		s.tb.Fatalf("no sandbox was called %s", name)
	}
	return id
}

func (s *scenario) sandbox(name string) *sandboxes.Sandbox {
	sb := s.w.core.sandboxes.Get(s.id(name))
	if sb == nil {
		s.tb.Fatalf("%s is not known any more", name)
	}
	return sb
}

func (s *scenario) pod(name string) *simPod { return s.w.pod(s.w.disk.sandboxes[s.id(name)].Pod) }

func (s *scenario) router(name string) *router {
	i := slices.IndexFunc(s.w.routers, func(r *router) bool { return r.id == name })
	if i < 0 {
		s.tb.Fatalf("no router is called %s", name)
	}
	return s.w.routers[i]
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err) // the pattern asks for digits
	}
	return n
}
