package claims

import (
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// claimed acts on one durable fact of a claim. All of them are in one Write.
func (t *Table) claimed(cl *Claim, f *fact.SandboxFact) {
	req, sb := &cl.Request, t.sandboxes.Bind(f)
	delete(t.taken, sb.Pod)
	switch req.got = append(req.got, sb); {
	case len(req.got) < len(req.pods):
	case f.Ungranted == 0:
		t.grant(cl)
	default:
		t.configure(cl)
	}
}

// grant gives a claim its sandboxes when all of them are durable, and their agents have answered. Those
// whose pods have ended meanwhile, or whose agents are not configured, do not count. If too few are
// left, the callers get others at their place, and their key stands for those. So a sandbox that is not
// granted has no key, and its object is written only with its release.
func (t *Table) grant(cl *Claim) {
	req := &cl.Request
	if req.revives != nil {
		t.revive(cl)
		return
	}
	got, first := req.got, t.outbox.Len()
	req.pods, req.facts, req.got = nil, nil, nil
	configured := slices.ContainsFunc(got, func(sb *sandboxes.Sandbox) bool { return sb.Agent.Port != 0 })
	fit := got[:0]
	for _, sb := range got {
		cause := t.notGrantedFor(sb)
		if cause == (fact.Cause{}) {
			fit = append(fit, sb)
			continue
		}
		if cause.Reason == fact.ReasonConfigurationFailed {
			req.problem = cause.Message
		}
		t.sandboxes.Reject(sb, req.boundAt, cause)
	}
	if len(fit) < req.atLeast {
		for _, sb := range fit {
			t.sandboxes.Reject(sb, req.boundAt, fact.Because(fact.ReasonBatchIncomplete))
		}
		t.outbox.Join(first) // the next leader must not find some of them live under the key
		t.tryAgain(cl, configured)
		return
	}
	abandoned, id := cl.Callers() == 0 && !req.binding.Keyed(), fit[0].Grant()
	t.Grant(cl, id, len(fit))
	if req.batch {
		t.needs[id] = req.atLeast
	}
	for _, sb := range fit {
		t.sandboxes.Grant(sb, req.boundAt)
		t.Emit(step.LabelPod{Pod: sb.Pod, Pool: sb.Pool.Name, ID: sb.ID})
		switch {
		case sb.Phase == fact.Running:
			t.sandboxes.Run(sb)
		case abandoned:
			t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
		default:
			t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
			t.Emit(step.StartSandbox{Sandbox: sb.Sandbox})
		}
	}
	if abandoned {
		for _, sb := range fit {
			t.sandboxes.End(sb, sandboxes.Serving, fact.Because(fact.ReasonCanceled))
		}
		t.Emit(step.ClaimCanceled{Pool: req.pool.Key})
		return
	}
	t.Emit(step.ClaimGranted{Pool: req.pool.Key, Waited: req.waited, Wait: t.Now.Boot - req.since})
	t.decided = append(t.decided, id) // after the routers have the routes
}

// staleRoutes is the message of an AddressShared that no other pod at the address has caused.
const staleRoutes = "requests of an earlier sandbox could still reach its address, so its claim got another pod"

// notGrantedFor returns why a durable sandbox is not granted; zero: it is. That its pod is not ready, or its node not
// usable, may pass, and ends no sandbox.
func (t *Table) notGrantedFor(sb *sandboxes.Sandbox) fact.Cause {
	if doomed := sb.Doomed(); doomed != nil {
		return *doomed
	}
	p := t.pods.Get(sb.Pod)
	cause, _ := sb.Unfit(p)
	if cause == (fact.Cause{}) && p.Withheld()&(pods.Tainted|pods.Quarantined) != 0 {
		return fact.Cause{Reason: fact.ReasonAddressShared, Message: staleRoutes}
	}
	return cause
}

// tryAgain returns a claim that got too few sandboxes to its place in the line, or refuses it. configured: agents of
// its pods were to be configured.
func (t *Table) tryAgain(cl *Claim, configured bool) {
	req := &cl.Request
	if configured {
		req.failures++
		for _, x := range t.ExpireBound(cl, t.Now.Boot) {
			t.refused(t.refusalOf(cl, x.Token, step.NotConfigured))
		}
	}
	switch {
	case cl.Callers() == 0:
		t.cancel(cl)
	case req.failures == MaxFailures:
		t.refuse(cl, step.NotConfigured)
	case !req.pool.Known || req.pool.Deleting:
		t.refuse(cl, step.NoPool)
	case configured && t.closing:
		t.refuse(cl, step.Ending)
	default:
		t.pods.Return(t.comesBack(cl)...)
	}
}
