package controlclient

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"time"

	"go.uber.org/zap"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/lastactive"
)

const (
	// finalLookTimeout bounds the look before a Goodbye. A shutdown leaves 2 s for both.
	finalLookTimeout = time.Second
	// askTimeout bounds the looks before a Quiesced, because requests are held meanwhile.
	askTimeout = 1600 * time.Millisecond
	// maxProbes bounds the sandboxes that are probed at one time. It is far above what slow pods
	// of one pool keep busy, because a probe takes up to 4 s.
	maxProbes = 1000
	// maxReportActivities bounds the activities of one message: the protocol's limit.
	maxReportActivities = 5000
	// maxReason bounds the length of a reason in bytes: the protocol's limit.
	maxReason = 256
)

// goodbye sends the final report, and that this router admits nothing any more.
func (s *stream) goodbye(ctx context.Context) error {
	if s.client.o.Egress != nil { // nothing of it is open, and it knows nothing about use
		return s.grpc.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{}}})
	}
	ctx, cancel := context.WithTimeout(ctx, finalLookTimeout)
	defer cancel()
	final := s.client.o.Uses.FinalReport(ctx)
	if final.LookError != "" {
		s.client.o.Log.Warn("ends without a final look: the allocator counts every sandbox as in use until now",
			zap.String("reason", final.LookError))
	}
	if err := s.report(final); err != nil {
		return err
	}
	m := &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{Looked: final.LookError == ""}}
	return s.grpc.Send(&controlv1.RouterMessage{Message: m})
}

// report sends the result of a look, in parts if it is long. It also sends an empty result.
func (s *stream) report(r lastactive.Report) error {
	for last := false; !last; {
		part := r.Activities[:min(len(r.Activities), maxReportActivities)]
		r.Activities = r.Activities[len(part):]
		last = len(r.Activities) == 0
		m := &controlv1.Report{Activities: toActivities(part)}
		switch {
		case !last:
		case r.LookError != "":
			m.LookError = reason(r.LookError)
		default:
			m.Gateway, m.Nonce = r.Gateway, s.newestPongBefore(r.Began)
			m.TookMillis = uint64((r.Took + time.Millisecond - 1) / time.Millisecond)
		}
		err := s.grpc.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Report{Report: m}})
		if err != nil {
			return err
		}
	}
	return nil
}

// reason shortens s to the length and encoding that the protocol requires.
func reason(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxReason)], "") }

func toActivities(activities []lastactive.Activity) []*controlv1.Activity {
	all := make([]*controlv1.Activity, 0, len(activities))
	for _, a := range activities {
		all = append(all, &controlv1.Activity{
			SandboxId: a.ID, AgeMillis: ageMillis(a.Age),
			OpenRequests: uint32(min(a.Open, math.MaxInt32)), Kind: string(a.Kind),
		})
	}
	return all
}

// ageMillis returns an age in milliseconds, rounded down but at least 1 if the age is above
// 0. The value 0 means that the use may continue without this router.
func ageMillis(age time.Duration) uint64 {
	if age <= 0 {
		return 0
	}
	return uint64(max(age, time.Millisecond) / time.Millisecond)
}

// applyQuiesce stops admissions, and passes the question to answerQuiesces. It does not wait
// for the answer, because later messages on the stream must not wait for Envoy.
func (s *stream) applyQuiesce(q *controlv1.Quiesce) {
	room := true
	for _, question := range q.GetQuestions() {
		room = s.client.o.Sandboxes.Quiesce(question.GetSandboxId()) && room
	}
	if !room {
		s.client.o.Log.Warn("too many sandboxes are quiesced; the question is not answered",
			zap.Uint64("number", q.GetNumber()))
		return
	}
	select {
	case earlier := <-s.quiesces:
		s.client.o.Log.Warn("a newer question about idle sandboxes has arrived; this one is not answered",
			zap.Uint64("number", earlier.GetNumber()))
	default:
	}
	s.quiesces <- q // does not block: only the reader sends
}

// answerQuiesces answers one Quiesce after the other until ctx ends.
func (s *stream) answerQuiesces(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case q := <-s.quiesces:
			s.answer(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Quiesced{Quiesced: s.ask(ctx, q)}})
		}
	}
}

// ask looks how the sandboxes of q were used.
func (s *stream) ask(ctx context.Context, q *controlv1.Quiesce) *controlv1.Quiesced {
	ids := make([]string, 0, len(q.GetQuestions()))
	for _, question := range q.GetQuestions() {
		ids = append(ids, question.GetSandboxId())
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	activities, err := s.client.o.Uses.Ask(ctx, ids)
	if err != nil {
		return &controlv1.Quiesced{Number: q.GetNumber(), LookError: reason(err.Error())}
	}
	return &controlv1.Quiesced{Number: q.GetNumber(), Activities: toActivities(activities)}
}

// answer queues the answer to a question.
func (s *stream) answer(m *controlv1.RouterMessage) {
	if !s.enqueue(m) {
		s.client.o.Log.Warn("the queue to the allocator is full; a question is not answered",
			zap.String("answer", fmt.Sprintf("%T", m.GetMessage())))
	}
}

// probe asks a sandbox whether it is busy and queues the answer. It does nothing while
// maxProbes run; the leader asks again.
func (s *stream) probe(ctx context.Context, p *controlv1.Probe) {
	addr, err := netip.ParseAddr(p.GetPodIp())
	if err != nil || p.GetPort() == 0 || p.GetPort() > math.MaxUint16 || s.probes.Load() >= maxProbes {
		return
	}
	s.probes.Add(1)
	s.helpers.Go(func() {
		defer s.probes.Add(-1)
		busy := s.client.o.Probe(ctx, netip.AddrPortFrom(addr.Unmap(), uint16(p.GetPort())), p.GetPath())
		m := &controlv1.RouterMessage_Probed{Probed: &controlv1.Probed{SandboxId: p.GetSandboxId(), Busy: busy, Number: p.GetNumber()}}
		s.answer(&controlv1.RouterMessage{Message: m})
	})
}
