package core

import (
	"fmt"
	"strconv"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// rulingWait bounds how long a call that has changed the rules of a sandbox waits for egress routers.
const rulingWait = 10 * time.Second

// ruling is a call that has changed the rules of a sandbox. Until it is answered, an egress router may let through what
// only the rules of before allow.
type ruling struct {
	token   uint64
	sandbox *sandboxes.Sandbox
}

// sendRules sends the egress routers the durable rules of a sandbox, and begins to wait for them. Those that are not
// connected are waited for too.
func (c *Core) sendRules(sb *sandboxes.Sandbox, token uint64) {
	name := strconv.FormatUint(token, 10)
	c.ruling[name] = &ruling{token, sb}
	c.routers.ruled = append(c.routers.ruled, name)
	c.routers.sendRules(sb, name)
}

func (r *routers) sendRules(sb *sandboxes.Sandbox, ruling string) {
	var having []string
	sent := map[string]uint64{}
	for _, s := range r.members.All() {
		if !s.Egress && !s.Earlier || !s.Durable || !s.Has(sb.Agent) { // it has no route
			continue
		}
		switch {
		case s.Stream == 0: // it may use the rules of before until it connects again, or expires
		case sb.Routable():
			sent[s.ID] = r.members.SentRoute(s, sb.ID)
			r.Emit(SendRoute{Stream: s.Stream, Sequence: sent[s.ID], Sandbox: sb.Sandbox})
		case s.Acked < s.Sequence: // it was sent that the sandbox closes, or a snapshot without it
			sent[s.ID] = s.Sequence
		default:
			continue
		}
		having = append(having, s.ID)
	}
	r.rulings.Begin(ruling, having, r.Now.Boot)
	for id, sequence := range sent {
		r.rulings.Sent(id, sequence, []string{ruling})
	}
	r.rulings.AllSent()
}

// advanceRulings answers the calls whose rules every egress router has.
func (c *Core) advanceRulings() {
	names := c.routers.ruled
	c.routers.ruled = nil
	for _, name := range names {
		if _, complete := c.routers.rulings.Advance(name, c.Now.Boot); complete {
			c.answerRuling(name, "")
		}
	}
}

// tickRulings answers the calls that have waited for too long. The rules hold all the same.
func (c *Core) tickRulings() {
	for name := range c.routers.rulings.UnderWay() {
		if began, _, _ := c.routers.rulings.Began(name); c.Now.Boot-began >= rulingWait {
			c.answerRuling(name, fmt.Sprintf("egress gateways that have not acknowledged them within %v: %d",
				rulingWait, c.routers.rulings.CountWaiting(name)))
		}
	}
}

func (c *Core) answerRuling(name, why string) {
	r := c.ruling[name]
	delete(c.ruling, name)
	c.routers.rulings.Drop(name)
	answer := step.SandboxCallAnswered{Token: r.token, Status: CallOK, Sandbox: r.sandbox.Sandbox, Why: why}
	switch {
	case !r.sandbox.Lives():
		answer.Status = CallGone
	case why != "":
		answer.Status = CallNotReady
	}
	c.Emit(answer)
}
