package chaos

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/harness"
)

// receiver keeps the events that were sent to it.
type receiver struct {
	mu     sync.Mutex
	events map[string][]string // types by sandbox, in the order of their arrival
	all    int
	wrong  []string
}

func newReceiver() *receiver { return &receiver{events: map[string][]string{}} }

const hookSecret = "a secret of the webhooks"

func (r *receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	var e struct {
		Type      string `json:"type"`
		SandboxID string `json:"sandbox_id"`
	}
	err = errors.Join(err, json.Unmarshal(body, &e))
	sum := sha256.Sum256([]byte(hookSecret + string(body)))
	r.mu.Lock()
	defer r.mu.Unlock()
	if got := request.Header.Get("e2b-signature"); err != nil || got != base64.RawURLEncoding.EncodeToString(sum[:]) {
		r.wrong = append(r.wrong, fmt.Sprintf("%v, signature %q of %s", err, got, body))
	}
	r.all++
	r.events[e.SandboxID] = append(r.events[e.SandboxID], e.Type)
	w.WriteHeader(http.StatusNoContent)
}

func (r *receiver) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all
}

// lacks returns an error if an event of one of the sandboxes has not arrived, or came before an earlier one.
func (r *receiver) lacks(ids []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	missing := 0
	for _, id := range ids {
		got := r.events[id]
		if len(got) == 0 || got[0] != "sandbox.lifecycle.created" || got[len(got)-1] != "sandbox.lifecycle.killed" {
			missing++
		}
	}
	if missing > 0 {
		return fmt.Errorf("%d of %d sandboxes lack an event; %d have arrived", missing, len(ids), r.all)
	}
	return nil
}

// serveAt serves at an address until close is called.
func serveAt(t *testing.T, address string, h http.Handler) (at string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	s := httptest.NewUnstartedServer(h)
	require.NoError(t, s.Listener.Close())
	s.Listener = l
	s.Start()
	return l.Addr().String(), sync.OnceFunc(s.Close)
}

// Leaders are killed while sandboxes are claimed and released. One receiver is killed and comes back, and one is slow.
//
// Invariant: P20, P22
func TestWebhooksGetEveryEventOverKilledLeaders(t *testing.T) {
	const killed = 2
	lives := times(150, 5000)
	args := []string{"--webhook-allow-http", "--webhook-allow=127.0.0.0/8"}
	g := newGround(t, options{replicas: 2, lease: lease, args: args})
	var cancel context.CancelFunc
	g.ctx, cancel = context.WithTimeout(t.Context(), time.Duration(times(1, 3))*limit)
	defer cancel()
	random := g.Random("webhooks")
	good, dead, slow := newReceiver(), newReceiver(), newReceiver()
	goodAt, stopGood := serveAt(t, "127.0.0.1:0", good)
	defer stopGood()
	deadAt, stopDead := serveAt(t, "127.0.0.1:0", dead)
	defer func() { stopDead() }()
	slowAt, stopSlow := serveAt(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(3 * time.Second):
		case <-r.Context().Done():
			return
		}
		slow.ServeHTTP(w, r)
	}))
	defer stopSlow()
	p := g.newPool("webhooks", int32(times(40, 250)), nil)
	do := func(method, path, body string) (a harness.Answer) {
		g.eventually(func() (err error) {
			a, err = harness.Do(g.ctx, g.HTTP, method, g.AnyAPI(random)+path, "", body)
			if err == nil && a.Code == http.StatusServiceUnavailable {
				err = fmt.Errorf("%d %s", a.Code, a.Body)
			}
			return err
		})
		return a
	}
	for name, at := range map[string]string{"good": goodAt, "dead": deadAt, "slow": slowAt} {
		body := fmt.Sprintf(`{"name":%q,"url":"http://%s/","signatureSecret":%q,`+
			`"events":["sandbox.lifecycle.created","sandbox.lifecycle.killed"]}`, name, at, hookSecret)
		a := do(http.MethodPost, "/events/webhooks", body)
		require.Equal(t, http.StatusCreated, a.Code, "%s", a.Body)
	}
	stopDead()

	began := time.Now()
	var mu sync.Mutex
	var ids []string
	var callers sync.WaitGroup
	left := make(chan int, lives)
	for i := range lives {
		left <- i
	}
	close(left)
	for n := range 8 {
		random := g.Random(fmt.Sprint("caller-", n))
		callers.Go(func() {
			for i := range left {
				c := claimant{name: fmt.Sprintf("life-%d", i), key: true, timeout: longTimeout, wait: claimWait, patient: true}
				got := p.claim(random, c)
				for got.Code == http.StatusTooManyRequests {
					got = p.claim(random, c)
				}
				if got.Code != http.StatusCreated {
					g.Errorf("claim: %+v", got)
					return
				}
				p.release(random, got.Sandbox)
				mu.Lock()
				ids = append(ids, got.Sandbox)
				mu.Unlock()
			}
		})
	}
	for n := range killed {
		g.eventually(func() error {
			mu.Lock()
			defer mu.Unlock()
			if len(ids) < (n+1)*lives/(killed+1) {
				return fmt.Errorf("%d of %d lives", len(ids), lives)
			}
			return nil
		})
		require.NoError(t, g.leader().Kill())
	}
	callers.Wait()
	lived := time.Since(began)
	g.eventually(func() error { return good.lacks(ids) })
	t.Logf("%d sandboxes lived in %v; all events of the good receiver after %v, %d in all",
		len(ids), lived, time.Since(began), good.count())
	require.Less(t, slow.count(), 2*lives, "the slow one has not got them yet")
	_, stopDead = serveAt(t, deadAt, dead)
	g.eventually(func() error { return dead.lacks(ids) })
	t.Logf("all events of the killed receiver after %v, %d in all", time.Since(began), dead.count())
	for _, r := range []*receiver{good, dead, slow} {
		r.mu.Lock()
		require.Empty(t, r.wrong)
		r.mu.Unlock()
	}

	a := do(http.MethodGet, "/events/sandboxes/"+ids[0]+"?orderAsc=true", "")
	require.Equal(t, http.StatusOK, a.Code, "%s", a.Body)
	var listed []struct{ Type, SandboxID string }
	require.NoError(t, json.Unmarshal(a.Body, &listed))
	require.Equal(t, "sandbox.lifecycle.created", listed[0].Type)
	require.Equal(t, "sandbox.lifecycle.killed", listed[len(listed)-1].Type)
	metrics, err := harness.ReadMetrics(g.ctx, g.HTTP, g.leader().Admin+"/metrics")
	require.NoError(t, err)
	t.Logf("the log has %v events in %v compressed bytes; %v were written in this term",
		metrics["berth_allocator_event_log_events"],
		metrics["berth_allocator_event_log_bytes"], metrics["berth_allocator_event_log_written_bytes_total"])
	require.Zero(t, metrics["berth_allocator_event_log_dropped_total"])
}
