package controlserver

import (
	"cmp"
	"context"
	"math"
	"regexp"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/openapi"
)

const (
	// usageWait bounds the wait for the answers of egress routers about one sandbox.
	usageWait = time.Second
	// maxQuestions bounds the questions that wait for answers at one time. For a further one no router is asked.
	maxQuestions = 64
	// maxDestinations bounds the destinations in one answer, and shownDestinations those of all routers that were
	// admitted, and those that were refused.
	maxDestinations, shownDestinations = 64, 32
	// maxHost bounds the host of a destination, in bytes.
	maxHost = 253
)

// reasonWord matches the reason of a refusal.
var reasonWord = regexp.MustCompile(`^[a-z_]{0,64}$`)

// question is one about the use of egress gateways. The lock of the server guards it.
type question struct {
	of      map[uint64]bool // the streams that have not answered
	answers chan *controlv1.EgressUsage
}

// EgressUsage asks all egress routers that are connected how a sandbox uses them, and returns the sum of what they say. It
// waits for usageWait at most. The rules are not set.
func (s *Server) EgressUsage(ctx context.Context, id string) openapi.SandboxEgress {
	ctx, cancel := context.WithTimeout(ctx, usageWait)
	defer cancel()
	number, q, gateways := s.askEgress(id)
	defer s.endQuestion(number)
	sum := usage{shown: openapi.SandboxEgress{Gateways: gateways, GatewaysSilent: gateways}, all: map[place]visits{}}
	for range cap(q.answers) {
		select {
		case m := <-q.answers:
			sum.add(m)
		case <-ctx.Done():
			return sum.result()
		}
	}
	return sum.result()
}

// askEgress asks the egress routers. The capacity of the channel is how many were asked.
func (s *Server) askEgress(id string) (number uint64, q *question, gateways int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastQuestion++
	q = &question{of: map[uint64]bool{}}
	for _, st := range s.streams {
		if !st.egress {
			continue
		}
		gateways++
		// The snapshot comes first on a stream. A question has no place in the queue that a fact may need.
		if !st.hasSnapshot || len(st.queue) > queueSize/2 || len(s.questions) >= maxQuestions {
			continue
		}
		select {
		case st.queue <- []*controlv1.AllocatorMessage{{Term: s.leader.Term(), Message: &controlv1.AllocatorMessage_AskEgressUsage{
			AskEgressUsage: &controlv1.AskEgressUsage{SandboxId: id, Number: s.lastQuestion},
		}}}:
			q.of[st.id] = true
		default:
		}
	}
	q.answers = make(chan *controlv1.EgressUsage, len(q.of))
	if len(q.of) > 0 {
		s.questions[s.lastQuestion] = q
	}
	return s.lastQuestion, q, gateways
}

func (s *Server) endQuestion(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.questions, number)
}

// answered passes on the answer of a router. One that comes too late is dropped.
func (s *Server) answered(stream uint64, m *controlv1.EgressUsage) error {
	if err := checkUsage(m); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.questions[m.GetNumber()]; q != nil && q.of[stream] {
		delete(q.of, stream)
		q.answers <- m // it has room for one of each stream
	}
	return nil
}

func checkUsage(m *controlv1.EgressUsage) error {
	if n := len(m.GetDestinations()); n > maxDestinations {
		return status.Errorf(codes.InvalidArgument, "egress_usage.destinations: %d exceed the limit of %d", n, maxDestinations)
	}
	for _, d := range m.GetDestinations() {
		switch {
		case d.GetHost() == "" || len(d.GetHost()) > maxHost:
			return status.Errorf(codes.InvalidArgument, "egress_usage.destinations: host: %d bytes: must be 1 to %d", len(d.GetHost()), maxHost)
		case d.GetPort() == 0 || d.GetPort() > math.MaxUint16:
			return status.Errorf(codes.InvalidArgument, "egress_usage.destinations: port %d: must be 1 to 65535", d.GetPort())
		case !reasonWord.MatchString(d.GetReason()):
			return status.Errorf(codes.InvalidArgument, "egress_usage.destinations: reason %.64q: must be a word of at most 64 characters of a-z and _", d.GetReason())
		}
	}
	return nil
}

// usage is the sum of answers.
type usage struct {
	shown openapi.SandboxEgress
	all   map[place]visits
}

// place is a destination and what became of the requests to it.
type place struct {
	host   string
	port   uint32
	reason string
}

type visits struct {
	count int64
	age   time.Duration
}

func (u *usage) add(m *controlv1.EgressUsage) {
	s := &u.shown
	s.GatewaysSilent--
	s.Admitted += bounded(m.GetAdmitted())
	s.Refused += bounded(m.GetRefused())
	s.Open += int64(m.GetOpen())
	s.SentBytes += bounded(m.GetSentBytes())
	s.ReceivedBytes += bounded(m.GetReceivedBytes())
	for _, d := range m.GetDestinations() {
		at, age := place{d.GetHost(), d.GetPort(), d.GetReason()}, ago(d.GetAgeMillis())
		v, again := u.all[at]
		if !again || age < v.age {
			v.age = age
		}
		v.count += bounded(d.GetCount())
		u.all[at] = v
	}
}

// result returns the sum, with the latest destinations.
func (u *usage) result() openapi.SandboxEgress {
	now, s := time.Now().UTC(), u.shown
	all := make([]openapi.EgressDestination, 0, len(u.all))
	for at, v := range u.all {
		all = append(all, openapi.EgressDestination{
			Host: at.host, Port: int(at.port), Reason: at.reason, Count: v.count, LastAt: now.Add(-v.age),
		})
	}
	slices.SortFunc(all, func(a, b openapi.EgressDestination) int {
		return cmp.Or(b.LastAt.Compare(a.LastAt), cmp.Compare(a.Host, b.Host), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Reason, b.Reason))
	})
	shown := map[bool]int{} // by whether they were refused
	s.Destinations = slices.DeleteFunc(all, func(d openapi.EgressDestination) bool {
		shown[d.Reason != ""]++
		return shown[d.Reason != ""] > shownDestinations
	})
	return s
}

// bounded is a number that JSON carries exactly.
func bounded(n uint64) int64 { return int64(min(n, 1<<53)) }
