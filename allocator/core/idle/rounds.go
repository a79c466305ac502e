package idle

import (
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// Probe asks a router to ask the pod of a sandbox whether it is busy. Probed takes the answer.
type Probe struct {
	Sandbox, Router string
	Number          uint64
}

// Ask is a question to every connected router. Answer takes the answers.
type Ask struct {
	Round     uint64
	Sandboxes []string // none: there is nothing to ask
}

// Verdict is the outcome of a round. The zero Verdict means that no round has ended.
type Verdict struct {
	// Idle are to be released. In a dry run they stay.
	Idle []string
	// Resume are those for which routers may admit requests again.
	Resume []string
}

// Ask begins a round if none is under way and something is due. The caller sends the question to
// every connected router. Without a router the round ends at once. If hasProbe says so, a router
// probes the pod of a sandbox before its round.
func (l *Ledger) Ask(now time.Duration, hasProbe func(id string) bool) (probes []Probe, ask Ask, v Verdict) {
	if l.asked != nil || now < l.nextRound {
		return nil, Ask{}, Verdict{}
	}
	for i := 0; i < maxDue && len(l.asked) < MaxRound; i++ {
		due := l.due.Due(now, 1)
		if len(due) == 0 {
			break
		}
		s := l.sandboxes[due[0]]
		quiet := s.quietUntil >= now
		s.probe, s.quietUntil = 0, 0
		switch {
		case max(l.idleAt(s), s.notBefore) > now: // it was used since
		case len(l.obstacles(s)) > 0:
			s.notBefore = now + AskAgain
		case quiet || !hasProbe(s.ID):
			l.asked = append(l.asked, s)
			ask.Sandboxes = append(ask.Sandboxes, s.ID)
			continue
		default:
			s.notBefore = now + AskAgain
			if r := l.proberOf(s, now); r != nil && len(probes) < MaxProbes {
				l.probe++
				s.notBefore, s.probe = now+ProbeWait, l.probe
				probes = append(probes, Probe{s.ID, r.id, l.probe})
			}
		}
		l.schedule(s)
	}
	if l.asked == nil {
		return probes, Ask{}, Verdict{}
	}
	l.round++
	ask.Round = l.round
	var took time.Duration
	for _, r := range l.routers {
		if r.connected {
			took = max(took, r.took)
		}
	}
	l.answersBy, l.nextRound = now+AnswerWait, now+min(pauseLooks*took, MaxPause)
	return probes, ask, l.judge(now)
}

// proberOf chooses an askable router, the next one for each attempt; nil: there is none.
func (l *Ledger) proberOf(s *sandbox, now time.Duration) *router {
	for i := range l.routers {
		r := l.routers[(int(s.routeSeq)+int(now/ProbeWait)+i)%len(l.routers)]
		if r.obstacle() == "" {
			return r
		}
	}
	return nil
}

// Probed records the answer of a pod to a probe. An answer that comes after the next probe, or
// after the pause for answers, does not count.
func (l *Ledger) Probed(id string, number uint64, busy bool, now time.Duration) {
	s := l.sandboxes[id]
	if s == nil || s.probe == 0 || s.probe != number || now > s.notBefore {
		return
	}
	s.probe, s.notBefore = 0, 0
	if busy {
		s.note(Use{At: now, Kind: activity.Busy})
	} else {
		s.quietUntil = now + ProbeWait + MaxPause
	}
	l.schedule(s)
}

// Answer records the answer of a router to the question of a round. It knows of no use that is not
// in activities. blind says why it cannot tell what is open; empty: it can.
func (l *Ledger) Answer(id string, round uint64, activities []Activity, blind string, now time.Duration) Verdict {
	r := l.router(id)
	if r == nil {
		return Verdict{}
	}
	r.mute = false
	if r.blind == unanswered && blind == "" {
		r.blind = ""
	}
	if l.asked == nil || round != l.round || now > l.answersBy {
		return Verdict{}
	}
	for _, a := range activities {
		l.noteActivity(r, a, now)
	}
	if blind != "" {
		r.blind = blind
		return l.endRound(false, now)
	}
	r.answered = round
	return l.judge(now)
}

// judge ends the round if every router has answered.
func (l *Ledger) judge(now time.Duration) Verdict {
	for _, r := range l.routers {
		if r.connected && r.answered != l.round {
			return Verdict{}
		}
	}
	return l.endRound(true, now)
}

// Expire ends the leftovers whose time is over, and the round when its time for answers is over. A
// router that did not answer is asked again after its late answer, or after its next good report.
func (l *Ledger) Expire(now time.Duration) Verdict {
	l.expireLeftovers(now)
	if l.asked == nil || now < l.answersBy {
		return Verdict{}
	}
	for _, r := range l.routers {
		if r.connected && r.answered != l.round {
			r.blind, r.mute = unanswered, true
		}
	}
	l.nextRound = now + MaxPause // requests are held while routers do not answer
	return l.endRound(false, now)
}

// endRound ends the round, if one is under way. sure: every router has answered, so the verdict
// stands. Otherwise the question is repeated after a pause.
func (l *Ledger) endRound(sure bool, now time.Duration) (v Verdict) {
	asked := l.asked
	l.asked = nil
	for _, s := range asked {
		if l.sandboxes[s.ID] != s {
			continue // its release ends the question
		}
		switch at := l.idleAt(s); {
		case !sure:
			s.notBefore = now + AskAgain
		case now < at: // it is in use, or was
		case l.dryRun:
			s.notBefore = now + at - s.At
			v.Idle = append(v.Idle, s.ID)
		default:
			v.Idle = append(v.Idle, s.ID)
			continue
		}
		v.Resume = append(v.Resume, s.ID)
		l.schedule(s)
	}
	return v
}
