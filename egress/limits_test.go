package egress

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	ratelimitcommonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/h2"
)

// kernel has the connections that Envoy has accepted: from before it asks about one until it has ended or is refused.
type kernel map[netip.Addr]int

func (k kernel) read(uint16) (map[netip.Addr]int, error) {
	all := map[netip.Addr]int{}
	for addr, n := range k {
		if n > 0 {
			all[addr] = n
		}
	}
	return all, nil
}

// open opens a connection, if it is admitted. One that must wait for a look gets it.
func (k kernel) open(t require.TestingT, p *peers, addr netip.Addr) bool {
	v := k.ask(p, addr)
	if v == awaitsLook {
		require.NoError(t, p.look())
		v = k.again(p, addr)
		require.NotEqual(t, awaitsLook, v)
	}
	return v != refusedNow
}

// ask asks about a new connection.
func (k kernel) ask(p *peers, addr netip.Addr) verdict {
	k[addr]++
	v, _, _ := p.connect(addr, 3128, false)
	if v == refusedNow {
		k[addr]--
	}
	return v
}

// again asks about a connection that has waited.
func (k kernel) again(p *peers, addr netip.Addr) verdict {
	v, _, _ := p.connect(addr, 3128, true)
	if v == refusedNow {
		k[addr]--
	}
	return v
}

// Invariant: P40
func TestNoAddressHasMoreThanItsShareOfConnections(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := kernel{}
		p := newPeers(MinConnections, k.read)
		total := func() (n int) {
			for _, own := range k {
				n += own
			}
			return n
		}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			addr := addrOf(rapid.IntRange(0, 3).Draw(t, "address"))
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				k[addr] = 0
			case 1:
				require.NoError(t, p.look())
			default:
				own, limit := k[addr], (MinConnections-total())/share
				if k.open(t, p, addr) {
					require.Less(t, own, limit)
				} else {
					require.GreaterOrEqual(t, own, limit, "what has ended does not count")
				}
			}
		}
	})
}

// Invariant: P40
func TestManySandboxesTogetherLeaveConnectionsForOthers(t *testing.T) {
	k := kernel{}
	p := newPeers(DefaultConnections, k.read)
	for i := range 100 {
		for k.open(t, p, addrOf(i)) {
		}
	}
	require.Less(t, k[addrOf(99)], k[addrOf(0)]/5, "the later, the fewer")
	for range 8 {
		require.True(t, k.open(t, p, addrOf(1000)))
	}
}

// Invariant: P40
func TestConnectionsThatWaitTakeNoShareOfTheirAddress(t *testing.T) {
	for _, during := range []int{0, 1, 50, 99} {
		k := kernel{}
		p := newPeers(DefaultConnections, k.read)
		require.NoError(t, p.look())
		for range DefaultConnections / (share + 1) { // each ends at once
			require.Equal(t, admittedNow, k.ask(p, addrOf(0)))
			k[addrOf(0)]--
		}
		for k.ask(p, addrOf(0)) == admittedNow {
			k[addrOf(0)]--
		}
		for range 99 - during {
			require.Equal(t, awaitsLook, k.ask(p, addrOf(0)))
		}
		p.read = func(port uint16) (map[netip.Addr]int, error) {
			for range during {
				require.Equal(t, awaitsLook, k.ask(p, addrOf(0)))
			}
			return k.read(port)
		}
		require.NoError(t, p.look())
		p.read = k.read
		for range 100 - during {
			require.Equal(t, admittedNow, k.again(p, addrOf(0)))
		}
		require.NoError(t, p.look())
		for range during {
			require.Equal(t, admittedNow, k.again(p, addrOf(0)))
		}
		require.NoError(t, p.look())
		require.Equal(t, 100, p.total)
		require.Zero(t, p.waits)
	}
}

// Invariant: P40
func TestConnectionsThatWaitTakeNoShareOfOthers(t *testing.T) {
	k := kernel{}
	p := newPeers(DefaultConnections, k.read)
	for i := range 100 {
		for k.open(t, p, addrOf(i)) {
		}
	}
	waiting := 0
	wait := func() {
		for i := range 100 {
			for k.ask(p, addrOf(i)) == awaitsLook {
				waiting++
			}
		}
	}
	p.read = func(port uint16) (map[netip.Addr]int, error) {
		wait()
		return k.read(port)
	}
	for range 2 { // first they come during the look only, then before it
		require.NoError(t, p.look())
		require.Greater(t, waiting, 200)
		for range 8 {
			require.Equal(t, admittedNow, k.ask(p, addrOf(1000)))
		}
		k[addrOf(1000)] = 0
		p.read = k.read
	}
}

// Invariant: P40
func TestConnectionsThatLeaveTheirLookHideNoOther(t *testing.T) {
	k := kernel{}
	p := newPeers(DefaultConnections, k.read)
	_, _, first := p.connect(addrOf(0), 3128, false) // leaves before the look
	_, _, second := p.connect(addrOf(0), 3128, false)
	p.left(addrOf(0), first)
	p.read = func(uint16) (map[netip.Addr]int, error) {
		p.left(addrOf(0), second)
		_, _, third := p.connect(addrOf(0), 3128, false)
		p.left(addrOf(0), third)
		return map[netip.Addr]int{addrOf(0): 7}, nil
	}
	require.NoError(t, p.look())
	require.Equal(t, 7, p.all[addrOf(0)].open)
	p.left(addrOf(0), second)
	require.Zero(t, p.all[addrOf(0)].waits+p.waits)
}

// Invariant: P40
func TestConnectionsThatCannotBeCountedAreNotAdmitted(t *testing.T) {
	broken := errors.New("boom")
	p := newPeers(DefaultConnections, func(uint16) (map[netip.Addr]int, error) { return nil, broken })
	v, _, look := p.connect(addrOf(0), 3128, false)
	require.Equal(t, awaitsLook, v)
	require.ErrorIs(t, p.look(), broken)
	<-look
	v, _, _ = p.connect(addrOf(0), 3128, true)
	require.Equal(t, refusedNow, v, "a router that has just started does not know what is open")

	k := kernel{}
	p = newPeers(DefaultConnections, k.read)
	require.NoError(t, p.look())
	p.read = func(uint16) (map[netip.Addr]int, error) { return nil, broken }
	admitted := 0
	for range 1000 {
		v, _, _ := p.connect(addrOf(0), 3128, true)
		if v == admittedNow {
			admitted++
		}
		require.ErrorIs(t, p.look(), broken)
	}
	require.LessOrEqual(t, admitted, DefaultConnections/share)
	require.Positive(t, admitted)
}

// Invariant: P40
func TestMemoryForAddressesIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeers(MinConnections, kernel{}.read)
		require.NoError(t, p.look())
		for i := range 10 * MinConnections {
			p.connect(addrOf(i), 3128, false)
			p.refused(addrOf(20_000 + i))
			if i%100 == 0 { // all have ended
				require.NoError(t, p.look())
			}
		}
		require.LessOrEqual(t, len(p.all), 2*MinConnections)
		time.Sleep(time.Minute)
		require.NoError(t, p.look())
		require.NoError(t, p.look())
		require.Empty(t, p.all)
	})
}

func TestSocketsOfThePortAreCountedByAddress(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::]:0"} {
		l, err := net.Listen("tcp", at)
		require.NoError(t, err)
		other, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		port := uint16(l.Addr().(*net.TCPAddr).Port)
		var mine []net.Conn
		for i, l := range []net.Listener{l, l, l, other} {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP([]string{"127.0.0.2", "127.0.0.3"}[i%2])}}
			c, err := d.Dial("tcp", fmt.Sprint("127.0.0.1:", l.Addr().(*net.TCPAddr).Port))
			require.NoError(t, err)
			defer c.Close()
			accepted, err := l.Accept()
			require.NoError(t, err)
			defer accepted.Close()
			mine = append(mine, accepted)
		}
		found, err := sockets(port)
		require.NoError(t, err)
		want := map[netip.Addr]int{netip.MustParseAddr("127.0.0.2"): 2, netip.MustParseAddr("127.0.0.3"): 1}
		require.Equal(t, want, found, at)
		require.NoError(t, mine[0].Close())
		found, err = sockets(port)
		require.NoError(t, err)
		require.Equal(t, 1, found[netip.MustParseAddr("127.0.0.2")], "one that was closed does not count")
		require.NoError(t, l.Close())
		require.NoError(t, other.Close())
	}
}

// connection is what Envoy asks about a new connection.
func connection(t testing.TB, entries ...string) []byte {
	d := &ratelimitcommonv3.RateLimitDescriptor{}
	for i := 0; i < len(entries); i += 2 {
		d.Entries = append(d.Entries, &ratelimitcommonv3.RateLimitDescriptor_Entry{Key: entries[i], Value: entries[i+1]})
	}
	raw, err := proto.Marshal(&ratelimitv3.RateLimitRequest{Descriptors: []*ratelimitcommonv3.RateLimitDescriptor{d}})
	require.NoError(t, err)
	return raw
}

func now(t testing.TB, h h2.Handler, message []byte) h2.Reply {
	reply, later := h.Now(message, "")
	if later != nil {
		reply = later(t.Context(), nil)
	}
	return reply
}

// answered is what Envoy is told about a new connection.
func answered(t testing.TB, s *Server, message []byte) ratelimitv3.RateLimitResponse_Code {
	var m ratelimitv3.RateLimitResponse
	require.NoError(t, proto.Unmarshal(now(t, connections{s}, message).Message, &m))
	return m.GetOverallCode()
}

func TestConnectionsAboveTheRateWaitForTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const consent, denial = ratelimitv3.RateLimitResponse_OK, ratelimitv3.RateLimitResponse_OVER_LIMIT
		s := newServer(t, newSlow())
		s.peers.read = kernel{}.read
		require.NoError(t, s.peers.look())
		of := func(i int) []byte { return connection(t, envoy.PeerKey, addrOf(i).String(), envoy.PortKey, "3128") }
		began := time.Now()
		for i := range connectBurst + 10*connectRate { // one after the other, and each ends
			require.Equal(t, consent, answered(t, s, of(0)))
			if i%10 == 0 {
				require.NoError(t, s.peers.look())
			}
		}
		require.InDelta(t, 10, time.Since(began).Seconds(), 0.1)
		began = time.Now()
		require.Equal(t, consent, answered(t, s, of(1)))
		require.Zero(t, time.Since(began), "others do not wait")
		for range 2 * connectRate * int(maxTurn/time.Second) {
			s.peers.refused(addrOf(0))
		}
		require.Equal(t, denial, answered(t, s, of(0)), "it would have to wait for too long")
		for _, wrong := range [][]byte{
			{1}, nil, connection(t, envoy.PeerKey, "x", envoy.PortKey, "1"),
			connection(t, envoy.PeerKey, "10.0.0.1", envoy.PortKey, "x"),
		} {
			require.Equal(t, codes.InvalidArgument, now(t, connections{s}, wrong).Status)
		}
	})
}

// Invariant: P40
func TestRefusalsOfOneAddressWaitForTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, newSlow(), "abc", "def")
		began := time.Now()
		fresh := s.o.Fresh
		s.o.Fresh = func() bool { return false }
		for range 2 * connectBurst {
			_, reason := ask(t, s, "abc", addrOf(1), "8.8.8.8:443")
			require.Equal(t, apierror.RouterNotReady, reason)
		}
		s.o.Fresh = fresh
		require.Equal(t, 2*connectBurst*notReadyPause, time.Since(began))
		require.Empty(t, s.peers.all, "the sandbox is not to blame")
		began = time.Now()
		for range connectBurst + 5*connectRate {
			_, reason := ask(t, s, "abc", addrOf(1), "8.8.8.8:443")
			require.Equal(t, apierror.EgressRefused, reason)
		}
		require.InDelta(t, 5, time.Since(began).Seconds(), 0.1)
		began = time.Now()
		_, reason := ask(t, s, "abc", addrOf(7), "8.8.8.8:443")
		require.Equal(t, apierror.EgressRefused, reason)
		dst, _ := ask(t, s, "def", addrOf(1), "8.8.8.8:443")
		require.NotEmpty(t, dst, "what is admitted does not wait")
		require.Zero(t, time.Since(began), "others do not wait")
	})
}

// Invariant: P40
func TestSilentNameServersOfOnePoolDelayNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSlow()
		s := newServer(t, r)
		all := []Sandbox{{ID: "def", Addr: addrOf(1000), TokenHash: sha256.Sum256([]byte("token-def")), Pool: "other"}}
		for i := range 200 {
			id := fmt.Sprint("abc", i)
			all = append(all, Sandbox{ID: id, Addr: addrOf(i), TokenHash: sha256.Sum256([]byte("token-" + id)), Pool: "own"})
		}
		require.NoError(t, s.Replace(all))
		var asking sync.WaitGroup
		for i := range 200 {
			for j := range maxSandboxLookups {
				asking.Go(func() { ask(t, s, fmt.Sprint("abc", i), addrOf(i), fmt.Sprintf("n%d.x%d.example.com:443", i, j)) })
			}
		}
		synctest.Wait()
		require.Equal(t, maxLookups/2, r.at)
		began := time.Now()
		for i := range maxSandboxLookups {
			asking.Go(func() {
				dst, _ := ask(t, s, "def", addrOf(1000), fmt.Sprintf("own%d.example.com:443", i))
				require.NotEmpty(t, dst)
				require.Equal(t, time.Second, time.Since(began), "it was looked up at once")
			})
		}
		asking.Wait()
		s.names.lookups.Wait()
		require.Empty(t, s.names.pools)
	})
}

// Invariant: P40
func TestRequestsToOneAddressLeaveItPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, newSlow(), "abc", "def")
		admitted, began := 0, time.Now()
		for time.Since(began) < time.Minute && admitted < 10_000 {
			_, reason := ask(t, s, "abc", addrOf(0), "8.8.8.8:443")
			if reason == "" {
				admitted++
				continue
			}
			require.Equal(t, apierror.RateLimited, reason)
			time.Sleep(time.Second / 100)
		}
		require.InDelta(t, originBurst+60*originRate, admitted, originRate)
		for reason := apierror.Reason(""); reason == ""; {
			_, reason = ask(t, s, "abc", addrOf(0), "8.8.8.8:443")
		}
		dst, _ := ask(t, s, "abc", addrOf(0), "8.8.4.4:443")
		require.NotEmpty(t, dst, "another address")
		dst, _ = ask(t, s, "def", addrOf(1), "8.8.8.8:443")
		require.NotEmpty(t, dst, "another sandbox")
	})
}

// Invariant: P40
func TestNoisySandboxesHideNoDestinationOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, log := observer.New(zap.InfoLevel)
		s, err := New(Options{
			Socket: "unused", Resolver: newSlow(), Fresh: func() bool { return true }, Log: zap.New(core),
		})
		require.NoError(t, err)
		var all []Sandbox
		for i := range 11 {
			id := fmt.Sprint("abc", i)
			all = append(all, Sandbox{
				ID: id, Addr: addrOf(i), TokenHash: sha256.Sum256([]byte("token-" + id)),
				Policy: policy.Policy{Ports: []uint16{443}},
			})
		}
		require.NoError(t, s.Replace(all))
		for i := range 10 {
			for port := range 1000 {
				ask(t, s, fmt.Sprint("abc", i), addrOf(i), fmt.Sprintf("8.8.8.8:%d", 1000+port))
			}
		}
		lines := log.TakeAll()
		require.LessOrEqual(t, len(lines), 10*(64+10), "a bucket for each, which gets one more each second")
		require.InDelta(t, 10_000-len(lines), testutil.ToFloat64(s.metrics.unlogged), 0)
		ask(t, s, "abc10", addrOf(10), "8.8.8.8:1")
		ask(t, s, "abc0", addrOf(0), "8.8.8.8:443")
		lines = log.TakeAll()
		require.Len(t, lines, 2, "the first refusal of another one, and what was admitted")
		time.Sleep(time.Minute)
		ask(t, s, "abc0", addrOf(0), "8.8.8.8:1999")
		line := log.TakeAll()
		require.Len(t, line, 1, "what the log does not have is new")
		require.Positive(t, line[0].ContextMap()["missed"])
		for port := range 20 * maxAudited {
			ask(t, s, "abc0", addrOf(0), fmt.Sprintf("8.8.8.8:%d", 3000+port))
			time.Sleep(time.Second)
		}
		require.Len(t, log.TakeAll(), 20*maxAudited, "a slow sandbox has all its destinations logged")
		require.LessOrEqual(t, len(s.table.all["abc0"].audits[lineRefused].seen), maxAudited)
	})
}

func TestQuestionsOfOneAddressLeaveSomeForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, newSlow())
		asked := 0
		s.asks.ask = func(string) bool { asked++; return true }
		var asking sync.WaitGroup
		for i := range 100 {
			asking.Go(func() { ask(t, s, fmt.Sprint("x", i), addrOf(7), "8.8.8.8:443") })
		}
		synctest.Wait()
		require.Equal(t, 16, asked)
		asking.Go(func() { ask(t, s, "fresh", addrOf(8), "8.8.8.8:443") })
		synctest.Wait()
		require.Equal(t, 17, asked)
		asking.Wait()
	})
}
