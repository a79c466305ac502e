package claims

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Serve gives warm pods to the claims that wait, one team after the other. A batch that waits collects
// its pods.
func (t *Table) Serve(pool *pools.Pool) {
	if pool.Deleting {
		for cl := t.line(pool.Key).First(); cl != nil; cl = t.line(pool.Key).First() {
			t.refuse(cl, step.NoPool)
		}
		return
	}
	for cl := t.next(pool); cl != nil; cl = t.next(pool) {
		switch p := pool.Next(); {
		case t.dropDead(cl):
		case p != nil && (cl.Request.values != nil || cl.Request.revives != nil) && p.Seen().AgentPort == 0: // of an older template
			t.refuse(cl, step.NotConfigured)
		case p != nil && cl.Request.hasRules() && !p.Seen().Egress: // so is this
			cl.Request.problem = noEgress
			t.refuse(cl, step.NotConfigured)
		case p != nil:
			t.pods.Take(p)
			t.taken[p.Key()], cl.Request.pods = cl, append(cl.Request.pods, p)
			if len(cl.Request.pods) < cl.Request.count {
				t.filling[pool.Key] = cl
				cl.Pass()
			} else {
				t.bind(cl)
			}
		case t.enough(pool):
			t.bind(t.filling[pool.Key])
		case pool.Refused != "":
			t.refuse(cl, step.NotAccepted)
		case t.closing:
			t.refuse(cl, step.Ending)
		default:
			return
		}
	}
}

// noEgress is why a sandbox with rules gets no pod.
const noEgress = "its rules of what it may reach need a pod that was made while its pool had spec.egress.mode Gateway: " +
	"set that, and try again when such a pod is warm"

// next returns the claim whose turn it is; nil: there is none. Only one batch at a time collects
// pods, because two could wait for each other.
func (t *Table) next(pool *pools.Pool) *Claim {
	filling := t.filling[pool.Key]
	return t.line(pool.Key).Next(func(cl *Claim) bool { return cl.Request.count == 1 || filling == nil || filling == cl })
}

// enough reports whether the batch that collects pods takes those that it has, when no pod is warm.
func (t *Table) enough(pool *pools.Pool) bool {
	cl := t.filling[pool.Key]
	return cl != nil && len(cl.Request.pods) >= cl.Request.atLeast &&
		(t.closing || pool.Refused != "" || cl.Request.ends || pool.Exhausted())
}

// bind gives the pods of a claim to sandboxes with IDs that were never used, and journals them in one
// Write.
func (t *Table) bind(cl *Claim) {
	req := &cl.Request
	pool, b := req.pool, req.binding
	if t.filling[pool.Key] == cl {
		delete(t.filling, pool.Key)
	}
	cl.Bind()
	req.boundAt, b.ClaimedAt = t.Now, t.Now.Wall
	if req.revives != nil {
		t.rebind(cl)
		return
	}
	b.Lifetime, b.Sleep = req.lifetime, req.sleep.of(pool.Sleep)
	if req.lifetime > 0 {
		b.EndAt = t.Now.Wall.Add(req.lifetime)
	}
	b.IdleTimeout, b.MinBytes = pool.IdleTimeout, pool.MinBytes
	if req.idle != nil {
		b.IdleTimeout = *req.idle
	}
	if req.minBytes != nil {
		b.MinBytes = *req.minBytes
	}
	b.Access = max(b.Access, pool.Access)
	if pool.MaxLifetime > 0 {
		b.LifetimeEnd = t.Now.Wall.Add(pool.MaxLifetime)
	}
	if pool.PostStart && pool.StartupTimeout > 0 {
		b.StartBy = t.Now.Wall.Add(pool.StartupTimeout + req.configuring)
	}
	if req.batch {
		b.Batch = t.cfg.NewID()
	}
	ungranted, first := 0, t.outbox.Len()
	if slices.ContainsFunc(req.pods, func(p *pods.Pod) bool { return p.Seen().AgentPort != 0 }) {
		ungranted = req.atLeast
	}
	for _, p := range req.pods {
		b.ID = t.cfg.NewID()
		if req.sealHeaders != nil {
			b.Network.Headers = req.sealHeaders(b.ID)
		}
		b.Agent = fact.Agent{}
		seen := p.Seen()
		if seen.AgentPort != 0 {
			b.Agent = fact.Agent{Port: seen.AgentPort, Public: pool.Agent.Public, Egress: seen.Egress}
		}
		sb := fact.Sandbox{
			Binding: b, Pool: pool.Key, Pod: p.Key(), IP: seen.IP,
			DefaultPort: pool.DefaultPort, Ports: pool.Ports, Restarts: seen.Restarts, Phase: fact.Running, StartedAt: b.ClaimedAt,
			Workload: seen.Workload,
		}
		if pool.PostStart {
			sb.Phase, sb.StartedAt = fact.Starting, time.Time{}
		}
		f := &fact.SandboxFact{Sandbox: sb, Ungranted: ungranted}
		req.facts = append(req.facts, t.outbox.Commit(t.Now.Boot, f, true, func(fact.Revision, time.Duration) { t.claimed(cl, f) }))
	}
	t.outbox.Join(first)
}
