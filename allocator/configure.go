package allocator

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// configureWait bounds one attempt to configure, or to ask, an agent.
	configureWait = time.Second
	// minAskPause and maxAskPause bound the pause after an agent has not answered whether it is
	// configured. It doubles each time.
	minAskPause = 50 * time.Millisecond
	maxAskPause = 5 * time.Second
	// leasePause is the pause until the lease is looked at again.
	leasePause = 50 * time.Millisecond
)

// configure has an agent configured, or asks it whether it is. It reports nothing when ctx ends: the
// next leader asks the agent, or the sandbox has been released.
func (t *term) configure(ctx context.Context, e core.Configure) {
	log := t.log.With(zap.String("pool", e.Sandbox.Pool.Name), zap.String("sandboxID", sandboxid.Short(e.Sandbox.ID)),
		zap.String("pod", e.Sandbox.Pod.Name))
	if t.agents == nil { // a replica with a key has made the claim
		log.Error("the agent of a sandbox cannot be configured without --access-key-file")
		t.Submit(core.Configured{ID: e.Sandbox.ID, Why: "the allocator has no --access-key-file"})
		return
	}
	if e.Ask {
		t.ask(ctx, e.Sandbox, log)
		return
	}
	values, _ := e.Values.(*agents.Values)
	var err error
	if e.Sandbox.Archive != "" {
		values, err = t.stoppedFiles(ctx, e.Sandbox)
	}
	if err == nil && values != nil && values.Restore != nil {
		err = t.restore(ctx, e.Sandbox, values)
	}
	if err == nil {
		call, cancel := context.WithTimeout(ctx, configureWait)
		err = t.agents.Configure(call, e.Sandbox, values)
		cancel()
	}
	for errors.Is(err, agents.ErrDeposed) && !t.Valid() { // if another replica leads by now, ctx ends soon
		if !wait.Sleep(ctx, leasePause) {
			return
		}
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		log.Warn("agent not configured, so its pod is thrown away", zap.Error(err))
	}
	t.a.traces.note(e.Sandbox.ID, func(s *claimSteps) { s.configured = time.Now() })
	t.Submit(core.Configured{ID: e.Sandbox.ID, OK: err == nil, Why: reasonOf(snapshots.Public(err)), Hopeless: hopeless(err) || e.Sandbox.Archive != "" && ofStore(err)})
}

// expect prepares the configuration of the agent in a pod that was seen.
func (t *term) expect(p *core.Pod) {
	if t.agents != nil && p.Pool != "" {
		t.agents.Expect(p)
	}
}

// maxReason bounds the text of an error in a record, in bytes.
const maxReason = 512

// reasonOf returns the text of an error for a record. The errors of packages agents and poststart quote nothing
// that a pod has sent.
func reasonOf(err error) string {
	if err == nil {
		return ""
	}
	return kube.Bounded(err.Error(), maxReason)
}

// ask repeats the question until the agent has answered.
func (t *term) ask(ctx context.Context, s core.Sandbox, log *zap.Logger) {
	for pause := minAskPause; ; pause = min(2*pause, maxAskPause) {
		call, cancel := context.WithTimeout(ctx, configureWait)
		configured, err := t.agents.Configured(call, s)
		cancel()
		if err == nil {
			t.Submit(core.Configured{ID: s.ID, OK: configured})
			return
		}
		if !wait.Sleep(ctx, pause) {
			return
		}
		if pause == maxAskPause {
			log.Warn("agent has not answered whether it is configured, asking again", zap.Error(err))
		}
	}
}
