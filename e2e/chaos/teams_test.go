package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Leaders are killed while two teams claim up to their limits and release, and while a third one claims a
// batch: before the batch is in the journal, after it is, and at any other time.
//
// It takes more than 20 s because it waits for a new leader, a lease of 3 s, five times.
// Invariant: I5, P3
func TestKilledLeadersKeepQuotasAndBatches(t *testing.T) {
	limits := filepath.Join(t.TempDir(), "limits.yaml")
	const named = "named: {small: {maxSandboxes: 5}, large: {maxSandboxes: 9}}\n"
	require.NoError(t, os.WriteFile(limits, []byte(named), 0o600))
	f := &faults{}
	g := newGround(t, options{
		replicas: 3, lease: lease, proxied: f,
		args: []string{"--api-keys-namespace=" + harness.Namespace, "--team-limits=" + limits},
	})
	g.newPool("many", 30, nil)
	g.newPool("few", 2, nil)
	small, large, batches := g.newTeam("small", 5), g.newTeam("large", 9), g.newTeam("batches", 0)
	outcomes := map[string]int{}
	for i := range times(3, 50) {
		ctx, stop := context.WithCancel(g.ctx)
		var all sync.WaitGroup
		if i%2 == 0 {
			small.churn(ctx, &all, i)
			large.churn(ctx, &all, i)
		}
		outcomes[batches.killInBatch(f, i)]++
		stop()
		all.Wait()
		small.fillsExactly()
		large.fillsExactly()
	}
	t.Logf("the batches under the next leader: %v", outcomes)
	for _, one := range []*team{small, large, batches} {
		for _, s := range one.live("") {
			one.release(s.SandboxID)
		}
	}
	g.eventually(func() (moving error) {
		for _, p := range g.pools {
			pods, err := p.pods()
			moving = errors.Join(moving, err, moves(p.state(), len(pods), 0))
		}
		return moving
	})
}

// team makes calls with a key of its own.
type team struct {
	*ground
	name, key string
	limit     int
	claims    int // that had a key
}

func (g *ground) newTeam(name string, limit int) *team {
	t := &team{ground: g, name: name, key: access.NewKey(), limit: limit}
	secret, err := access.NewSecret(t.key, access.Caller{Key: name, Team: name, Role: access.Member})
	require.NoError(g, err)
	_, err = g.Clients.Kubernetes.CoreV1().Secrets(harness.Namespace).Create(g.ctx, secret, metav1.CreateOptions{})
	require.NoError(g, err)
	return t
}

// call makes a call at any replica.
func (t *team) call(random *rand.Rand, method, path, body string, headers ...string) (harness.Answer, error) {
	headers = append(headers, "X-API-Key", t.key)
	return harness.Do(t.ctx, t.HTTP, method, t.AnyAPI(random)+path, "", body, headers...)
}

// answered repeats a call that may be repeated until a leader answers it.
func (t *team) answered(method, path, body string, headers ...string) (a harness.Answer) {
	t.Helper()
	random := t.Random(t.name)
	t.eventually(func() (err error) {
		a, err = t.call(random, method, path, body, headers...)
		notYet := a.Code == http.StatusServiceUnavailable || a.Code == http.StatusUnauthorized // its keys are not read
		if err == nil && notYet {
			err = fmt.Errorf("%d %s", a.Code, a.Body)
		}
		return err
	})
	return a
}

// live lists the live sandboxes of the team, those of a claim if it is set.
func (t *team) live(claim string) (all []openapi.Sandbox) {
	t.Helper()
	query := url.Values{"limit": {"100"}}
	if claim != "" {
		query.Set("metadata", harness.ClaimField+"="+claim)
	}
	for more := true; more; more = query.Get("nextToken") != "" {
		a := t.answered(http.MethodGet, "/v2/sandboxes?"+query.Encode(), "")
		require.Equal(t, http.StatusOK, a.Code, string(a.Body))
		var page []openapi.Sandbox
		require.NoError(t, json.Unmarshal(a.Body, &page))
		all = append(all, page...)
		query.Set("nextToken", a.Header.Get(rest.NextTokenHeader))
	}
	return all
}

// churn has callers claim and release until ctx ends. They ask for more than the limit. Each call is waited
// for, because a call that is given up may change something later.
func (t *team) churn(ctx context.Context, all *sync.WaitGroup, round int) {
	const body = `{"templateID":"many","timeout":3600,"waitTimeout":1}`
	for i := range t.limit {
		all.Go(func() {
			random := t.Random(fmt.Sprintf("%s-%d-%d", t.name, round, i))
			var own []string
			for ctx.Err() == nil {
				a, err := t.call(random, http.MethodPost, "/sandboxes", body)
				var s openapi.Sandbox
				if err == nil && a.Code == http.StatusCreated && json.Unmarshal(a.Body, &s) == nil {
					own = append(own, s.SandboxID)
				}
				if len(own) > 0 && random.IntN(2) == 0 {
					_, _ = t.call(random, http.MethodDelete, "/sandboxes/"+own[0], "")
					own = own[1:]
				}
				wait.Sleep(ctx, harness.Within(random, pauseMost/5)) // without a leader every call is refused at once
			}
		})
	}
}

// fillsExactly claims as many sandboxes as the limit leaves, is refused the next one, and gets one more
// after a release. It leaves the team few sandboxes.
func (t *team) fillsExactly() {
	t.Helper()
	var ids []string
	for _, s := range t.live("") {
		ids = append(ids, s.SandboxID)
	}
	require.LessOrEqual(t, len(ids), t.limit, t.name)
	claim := func() (id string) {
		t.claims++
		a := t.answered(http.MethodPost, "/sandboxes", `{"templateID":"many","timeout":3600,"waitTimeout":30}`,
			"Idempotency-Key", fmt.Sprintf("%s-%d", t.name, t.claims))
		if a.Code == http.StatusCreated {
			var s openapi.Sandbox
			require.NoError(t, json.Unmarshal(a.Body, &s))
			return s.SandboxID
		}
		var refusal apierror.Error
		require.NoError(t, json.Unmarshal(a.Body, &refusal))
		require.Equal(t, apierror.QuotaExceeded, refusal.Reason, refusal.Message)
		require.Equal(t, http.StatusTooManyRequests, a.Code)
		return ""
	}
	for len(ids) < t.limit {
		id := claim()
		require.NotEmpty(t, id, "%s has %d of %d sandboxes", t.name, len(ids), t.limit)
		ids = append(ids, id)
	}
	require.Empty(t, claim(), "%s has %d sandboxes", t.name, len(ids))
	t.release(ids[0])
	ids[0] = claim()
	require.NotEmpty(t, ids[0], "%s has released one of %d", t.name, len(ids))
	for _, id := range ids[2:] {
		t.release(id)
	}
}

func (t *team) release(id string) {
	t.Helper()
	a := t.answered(http.MethodDelete, "/sandboxes/"+id, "")
	require.Contains(t, []int{http.StatusNoContent, http.StatusNotFound}, a.Code, string(a.Body))
}

// The sandboxes of a batch.
const most, least = 5, 3

// killInBatch claims a batch, kills the leader meanwhile, and checks what the next leader has of it. It
// returns what that was.
func (t *team) killInBatch(f *faults, round int) (outcome string) {
	t.Helper()
	random := t.Random(fmt.Sprintf("batch-%d", round))
	leader, pool := t.leader(), "many"
	claim := fmt.Sprintf("batch-%d", round)
	sprung := make(chan struct{})
	var kill func() // waits for the moment
	switch round % 5 {
	case 0, 1: // the batch is on its way into the journal, or in it
		kill = func() {
			f.trap.Store(&trap{after: round%5 == 1, sprung: sprung})
			select {
			case <-sprung:
			case <-time.After(time.Second): // it was faster
			}
		}
	case 2: // at any time
		kill = func() { time.Sleep(harness.Within(random, 40*time.Millisecond)) }
	case 3: // it collects pods
		pool = "few"
		kill = func() { time.Sleep(harness.Within(random, 200*time.Millisecond)) }
	case 4: // it is answered
		kill = func() {}
	}
	body := fmt.Sprintf(`{"pool":%q,"count":%d,"atLeast":%d,"timeout":3600,"waitTimeout":60,"metadata":{%q:%q}}`,
		pool, most, least, harness.ClaimField, claim)
	var first []string
	var all sync.WaitGroup
	answer := func(ctx context.Context) {
		a, err := harness.Do(ctx, t.HTTP, http.MethodPost, leader.API+"/v1/claims", "", body,
			"X-API-Key", t.key, "Idempotency-Key", claim)
		if err == nil && a.Code == http.StatusCreated {
			first = t.idsOf(a)
		}
	}
	if round%5 == 4 {
		answer(t.ctx)
	} else {
		onceSent(t.ctx, &all, answer)
	}
	kill()
	t.Did(leader.Name, "kill")
	require.NoError(t, leader.Kill())
	f.trap.Store(nil)
	all.Wait()

	var found []string
	for _, s := range t.live(claim) {
		found = append(found, s.SandboxID)
	}
	if len(found) > 0 || first != nil {
		require.GreaterOrEqual(t, len(found), least, "%s", claim)
	}
	require.LessOrEqual(t, len(found), most)
	if first != nil {
		require.ElementsMatch(t, first, found, "what was answered")
	}
	repeat := func() []string {
		a := t.answered(http.MethodPost, "/v1/claims", body, "Idempotency-Key", claim)
		require.Equal(t, http.StatusCreated, a.Code, string(a.Body))
		return t.idsOf(a)
	}
	again := repeat()
	if len(found) > 0 {
		require.ElementsMatch(t, found, again)
	}
	require.ElementsMatch(t, again, repeat())
	for _, s := range t.live(claim) {
		require.Contains(t, again, s.SandboxID, "only what is answered is live")
		t.release(s.SandboxID)
	}
	switch {
	case first != nil:
		return "answered"
	case len(found) == 0:
		return "none"
	case len(found) == most:
		return "all"
	}
	return "enough"
}

// idsOf reads the answer to a batch, whose sandboxes are all live.
func (t *team) idsOf(a harness.Answer) (ids []string) {
	var all openapi.Claims
	if err := json.Unmarshal(a.Body, &all); err != nil || len(all.Ended) > 0 || len(all.Sandboxes) < least {
		t.Errorf("a batch of %d: %s: %v", len(all.Sandboxes), a.Body, err)
	}
	for _, s := range all.Sandboxes {
		ids = append(ids, s.SandboxID)
	}
	slices.Sort(ids)
	return ids
}
