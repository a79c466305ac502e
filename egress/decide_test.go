package egress

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/h2"
	"github.com/berth-sandbox/berth/internal/rate"
)

// slow is a resolver whose look-ups take a second. It knows every name but "missing".
type slow struct {
	mu             sync.Mutex
	asked, at, max int
	err            error
	addrs          []netip.Addr
}

func (r *slow) LookupNetIP(ctx context.Context, _, host string) ([]netip.Addr, error) {
	r.mu.Lock()
	r.asked++
	r.at++
	r.max = max(r.max, r.at)
	r.mu.Unlock()
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at--
	if host == "missing.example.com." {
		return nil, &net.DNSError{IsNotFound: true}
	}
	return r.addrs, r.err
}

func newSlow() *slow { return &slow{addrs: []netip.Addr{netip.MustParseAddr("8.8.8.8")}} }

func newServer(t testing.TB, resolver Resolver, ids ...string) *Server {
	s, err := New(Options{Socket: "unused", Resolver: resolver, Fresh: func() bool { return true }, Log: zap.NewNop()})
	require.NoError(t, err)
	var all []Sandbox
	for i, id := range ids {
		all = append(all, Sandbox{ID: id, Addr: addrOf(i), TokenHash: sha256.Sum256([]byte("token-" + id))})
	}
	require.NoError(t, s.Replace(all))
	return s
}

func addrOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) }

// message is what Envoy sends for CONNECT by the sandbox that has an ID and an address.
func message(t testing.TB, id string, at netip.Addr, authority string) []byte {
	auth := "Basic " + base64.StdEncoding.EncodeToString([]byte(id+":token-"+id))
	var headers []*corev3.HeaderValue
	for _, h := range [][2]string{
		{":authority", authority}, {":method", "CONNECT"}, {envoy.PeerHeader, at.String()}, {"proxy-authorization", auth},
	} {
		headers = append(headers, &corev3.HeaderValue{Key: h[0], RawValue: []byte(h[1])})
	}
	raw, err := proto.Marshal(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}},
	}})
	require.NoError(t, err)
	return raw
}

// ask returns where a request may go, or why it is refused. The request ends at once.
func ask(t testing.TB, s *Server, id string, at netip.Addr, authority string) (dst string, reason apierror.Reason) {
	reply, later := s.Now(message(t, id, at, authority), "")
	if later != nil {
		reply = later(t.Context(), nil)
	}
	return read1(t, reply)
}

func read1(t testing.TB, reply h2.Reply) (dst string, reason apierror.Reason) {
	var m extprocv3.ProcessingResponse
	require.NoError(t, proto.Unmarshal(reply.Message, &m))
	fields := m.GetDynamicMetadata().GetFields()[envoy.MetadataNamespace].GetStructValue().GetFields()
	if reply.Open != nil {
		reply.Open.Ended(true)
		return fields[envoy.MetadataDst].GetStringValue(), ""
	}
	return "", apierror.Reason(fields[envoy.MetadataReply].GetStringValue())
}

// Invariant: P35
func TestNothingIsAdmittedBeforeTheFirstSnapshot(t *testing.T) {
	s, err := New(Options{Socket: "unused", Resolver: newSlow(), Fresh: func() bool { return true }, Log: zap.NewNop()})
	require.NoError(t, err)
	abc := Sandbox{ID: "abc", Addr: addrOf(0), TokenHash: sha256.Sum256([]byte("token-abc"))}
	require.NoError(t, s.Set(abc))
	_, reason := ask(t, s, "abc", addrOf(0), "8.8.8.8:443")
	require.Equal(t, apierror.RouterNotReady, reason)
	require.NoError(t, s.Replace(nil))
	_, reason = ask(t, s, "abc", addrOf(0), "8.8.8.8:443")
	require.Equal(t, apierror.EgressRefused, reason, "the snapshot has no sandbox")
}

func TestSandboxesThatCannotBeAreNamed(t *testing.T) {
	s := newServer(t, newSlow())
	for _, wrong := range []Sandbox{
		{ID: "", Addr: addrOf(0)}, {ID: "a/b", Addr: addrOf(0)}, {ID: "abc"},
		{ID: "abc", Addr: netip.MustParseAddr("fe80::1%lo")}, {ID: "abc", Addr: netip.MustParseAddr("::ffff:10.0.0.1")},
	} {
		require.Error(t, s.Set(wrong))
		require.Error(t, s.Replace([]Sandbox{wrong}))
	}
}

func TestOneLookUpServesAllThatWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		s := newServer(t, r, "abc", "def")
		var asking sync.WaitGroup
		for i := range 100 {
			asking.Go(func() {
				dst, _ := ask(t, s, []string{"abc", "def"}[i%2], addrOf(i%2), "example.com:443")
				require.Equal(t, "8.8.8.8:443", dst)
			})
		}
		asking.Wait()
		require.Equal(t, 1, r.asked)
		time.Sleep(lookupAge - time.Millisecond)
		ask(t, s, "abc", addrOf(0), "example.com:443")
		require.Equal(t, 1, r.asked)
		time.Sleep(2 * time.Millisecond)
		ask(t, s, "abc", addrOf(0), "example.com:443")
		require.Equal(t, 2, r.asked, "an answer is used for a moment only")
	})
}

func TestLookUpsOfOneSandboxLeavePlacesForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		s := newServer(t, r, "abc", "def")
		var asking sync.WaitGroup
		reasons := make(chan apierror.Reason, 100)
		for i := range 100 {
			asking.Go(func() {
				_, reason := ask(t, s, "abc", addrOf(0), fmt.Sprintf("n%d.example.com:443", i))
				reasons <- reason
			})
		}
		synctest.Wait()
		began := time.Now()
		dst, _ := ask(t, s, "def", addrOf(1), "n99.example.com:443")
		require.Equal(t, "8.8.8.8:443", dst, "also a name that another sandbox waits to look up")
		require.Equal(t, time.Second, time.Since(began))
		asking.Wait()
		s.names.lookups.Wait()
		require.LessOrEqual(t, r.max, maxSandboxLookups+1)
		refused := 0
		for range 100 {
			if reason := <-reasons; reason != "" {
				require.Contains(t, []apierror.Reason{apierror.TooManyOpen, apierror.EgressUnreachable}, reason)
				refused++
			}
		}
		require.Positive(t, refused, "those that had no place in time, or no answer")
		require.LessOrEqual(t, refused, 100-maxSandboxLookups)
	})
}

// Invariant: P35
func TestNamesOfTheClusterAreNotLookedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		s := newServer(t, r, "abc")
		s.o.ClusterDomain = "k8s.example.com"
		for _, name := range []string{
			"db.prod.svc.k8s.example.com", "K8S.example.com.", "k8s.example.com", "a.cluster.local",
		} {
			_, reason := ask(t, s, "abc", addrOf(0), name+":443")
			require.Equal(t, apierror.EgressRefused, reason, name)
		}
		require.Zero(t, r.asked)
		dst, _ := ask(t, s, "abc", addrOf(0), "not-k8s.example.com:443")
		require.Equal(t, "8.8.8.8:443", dst)
	})
}

func TestLookUpsThatFailAreNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		s := newServer(t, r, "abc")
		r.err = errors.New("boom")
		_, reason := ask(t, s, "abc", addrOf(0), "example.com:443")
		require.Equal(t, apierror.EgressUnreachable, reason)
		r.err = nil
		dst, _ := ask(t, s, "abc", addrOf(0), "example.com:443")
		require.Equal(t, "8.8.8.8:443", dst)
		for range 2 {
			_, reason = ask(t, s, "abc", addrOf(0), "missing.example.com:443")
			require.Equal(t, apierror.EgressUnreachable, reason)
		}
		require.Equal(t, 3, r.asked, "that a name does not exist is kept")
	})
}

func TestFailureOfASharedLookUpNamesOnlyTheOwnSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		r.err = errors.New("boom")
		s := newServer(t, r, "abc", "def")
		var asking sync.WaitGroup
		for i, id := range []string{"abc", "def", "abc", "def"} {
			asking.Go(func() {
				_, later := s.Now(message(t, id, addrOf(i%2), "example.com:443"), "")
				var m extprocv3.ProcessingResponse
				require.NoError(t, proto.Unmarshal(later(t.Context(), nil).Message, &m))
				require.Contains(t, string(m.GetImmediateResponse().GetBody()), `"sandboxID":"`+id+`"`)
			})
		}
		asking.Wait()
		require.Equal(t, 1, r.asked)
	})
}

func TestAddressesTakeTurnsWithIPv4First(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		s := newServer(t, r, "abc")
		turns := func(want ...string) {
			t.Helper()
			time.Sleep(2 * lookupAge)
			seen := map[string]bool{}
			for range 20 {
				dst, _ := ask(t, s, "abc", addrOf(0), "example.com:443")
				seen[dst] = true
			}
			require.Len(t, seen, len(want))
			for _, dst := range want {
				require.True(t, seen[dst], dst)
			}
		}
		parse := netip.MustParseAddr
		r.addrs = []netip.Addr{
			parse("2606:4700::1"), parse("8.8.8.8"), parse("10.0.0.1"), parse("9.9.9.9"), parse("::ffff:1.1.1.1"),
		}
		turns("8.8.8.8:443", "9.9.9.9:443", "1.1.1.1:443")
		r.addrs = []netip.Addr{parse("2606:4700::1"), parse("10.0.0.1"), parse("::1")}
		turns("[2606:4700:0000:0000:0000:0000:0000:0001]:443")
	})
}

// Every request is under the rules of some moment at which it was under way, and none is left when Forget has
// returned.
func TestManyChangesLeaveNoRequestBehind(t *testing.T) {
	s := newServer(t, newSlow(), "abc")
	sandbox := Sandbox{ID: "abc", Addr: addrOf(0), TokenHash: sha256.Sum256([]byte("token-abc"))}
	var asking sync.WaitGroup
	end := make(chan struct{})
	for range 4 {
		asking.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
					ask(t, s, "abc", addrOf(0), "8.8.8.8:443")
				}
			}
		})
	}
	for i := range 2000 {
		sandbox.Incarnation = uint64(i / 10)
		sandbox.Policy = policy.Policy{Ports: [][]uint16{nil, {80}}[i%2]}
		require.NoError(t, s.Set(sandbox))
		if i%10 == 9 {
			s.Forget("abc")
			ended := make(chan struct{})
			s.Barrier(func() { close(ended) })
			<-ended
			s.table.mu.Lock()
			require.Empty(t, s.table.all)
			require.Empty(t, s.table.at)
			require.Len(t, s.table.epochs, 1)
			require.Zero(t, s.table.epochs[0].left)
			s.table.mu.Unlock()
		}
	}
	close(end)
	asking.Wait()
}

// BenchmarkNow is one decision of a router with 10,000 sandboxes, from the message of Envoy to the answer.
func BenchmarkNow(b *testing.B) {
	var ids []string
	for i := range 10_000 {
		ids = append(ids, fmt.Sprintf("sandbox%d", i))
	}
	s := newServer(b, newSlow(), ids...)
	allow := []string{"api.example.com"}
	for i := range 19 {
		allow = append(allow, fmt.Sprintf("*.n%d.example.com", i))
	}
	rules, err := policy.Parse(
		policy.List{Field: "allow", Entries: allow}, policy.List{Field: "deny", Entries: []string{"0.0.0.0/0"}})
	require.NoError(b, err)
	require.NoError(b, s.Set(Sandbox{
		ID: "sandbox77", Addr: addrOf(77), TokenHash: sha256.Sum256([]byte("token-sandbox77")),
		Policy: policy.Policy{Claim: rules},
	}))
	m := message(b, "sandbox77", addrOf(77), "api.example.com:443")
	s.names.answers.Add("api.example.com", &answer{
		done: closed(), addrs: []netip.Addr{netip.MustParseAddr("8.8.8.8")}, until: time.Now().Add(time.Hour),
	})
	_, later := s.Now(m, "") // writes the line of the log
	later(b.Context(), nil).Open.Ended(true)
	b.ReportAllocs()
	for b.Loop() {
		reply, _ := s.Now(m, "")
		reply.Open.Ended(true)
	}
}

func closed() chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

func TestUnknownSandboxIsAskedForOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, newSlow(), "abc")
		var asked []string
		s.asks.ask = func(id string) bool { asked = append(asked, id); return true }
		var asking sync.WaitGroup
		for range 10 {
			asking.Go(func() {
				dst, _ := ask(t, s, "fresh", addrOf(7), "8.8.8.8:443")
				require.Equal(t, "8.8.8.8:443", dst)
			})
		}
		synctest.Wait()
		require.Equal(t, []string{"fresh"}, asked)
		require.NoError(t, s.Set(Sandbox{ID: "fresh", Addr: addrOf(7), TokenHash: sha256.Sum256([]byte("token-fresh"))}))
		s.Answered("fresh")
		asking.Wait()
		began := time.Now()
		_, reason := ask(t, s, "fresh", addrOf(0), "8.8.8.8:443")
		require.Equal(t, apierror.EgressRefused, reason, "the address of another one")
		require.Equal(t, began, time.Now())
		require.Len(t, asked, 1)
	})
}

func TestRequestAfterAQuestionTakesAToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, newSlow())
		s.rate = rate.New(1, 1)
		s.asks.ask = func(string) bool { return true }
		var asking sync.WaitGroup
		asking.Go(func() {
			dst, _ := ask(t, s, "fresh", addrOf(7), "8.8.8.8:443")
			require.Equal(t, "8.8.8.8:443", dst)
		})
		synctest.Wait()
		require.NoError(t, s.Set(Sandbox{ID: "fresh", Addr: addrOf(7), TokenHash: sha256.Sum256([]byte("token-fresh"))}))
		s.Answered("fresh")
		asking.Wait()
		_, reason := ask(t, s, "fresh", addrOf(7), "8.8.8.8:443")
		require.Equal(t, apierror.RateLimited, reason)
		time.Sleep(time.Second)
		dst, _ := ask(t, s, "fresh", addrOf(7), "looked-up.example.com:443")
		require.NotEmpty(t, dst, "a request takes one, also if its name is looked up")
	})
}

func TestQuestionsAboutUnknownSandboxesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, newSlow(), "abc")
		asked := 0
		s.asks.ask = func(string) bool { asked++; return true }
		began := time.Now()
		var asking sync.WaitGroup
		for i := range 100 {
			asking.Go(func() {
				_, reason := ask(t, s, fmt.Sprint("x", i), addrOf(7+i), "8.8.8.8:443")
				require.Equal(t, apierror.EgressRefused, reason)
			})
		}
		asking.Wait()
		require.Equal(t, maxAsks, asked)
		require.Equal(t, askTimeout, time.Since(began), "there was no answer")
		require.Empty(t, s.asks.pending)
		for i := range 5000 {
			s.asks.end("x", s.asks.begin("x", addrOf(7+i)))
		}
		require.LessOrEqual(t, asked, 2200)
		s.asks.ask = func(string) bool { return false }
		_, reason := ask(t, s, "y", addrOf(7), "8.8.8.8:443")
		require.Equal(t, apierror.EgressRefused, reason)
		require.Equal(t, askTimeout, time.Since(began), "there is no session")
	})
}

// admit admits a request of a sandbox and returns what ends it.
func admit(t testing.TB, s *Server, id string, at netip.Addr) h2.Open {
	reply, later := s.Now(message(t, id, at, "8.8.8.8:443"), "")
	if later != nil {
		reply = later(t.Context(), nil)
	}
	require.NotNil(t, reply.Open)
	return reply.Open
}

// Invariant: P36
func TestBarriersWaitInOrderForWhatWasCut(t *testing.T) {
	s := newServer(t, newSlow(), "abc", "def")
	var done []int
	barrier := func(n int) { s.Barrier(func() { done = append(done, n) }) }
	barrier(1)
	require.Equal(t, []int{1}, done, "nothing was cut")
	abc, def, other := admit(t, s, "abc", addrOf(0)), admit(t, s, "def", addrOf(1)), admit(t, s, "def", addrOf(1))
	barrier(2)
	require.Equal(t, []int{1, 2}, done, "what may go on delays nothing")
	s.Forget("abc")
	barrier(3)
	s.Forget("def")
	barrier(4)
	barrier(5)
	def.Ended(true)
	other.Ended(false)
	require.Equal(t, []int{1, 2}, done)
	abc.Ended(true)
	require.Equal(t, []int{1, 2, 3}, done, "Envoy may not have read the end of the other one")
	require.Equal(t, 1, s.Unended())
	require.Len(t, s.table.epochs, 2, "barriers of nothing take no room")
}
