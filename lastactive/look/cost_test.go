package look_test

import (
	"context"
	"fmt"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
)

// hostsOpen is how many sandboxes have a request open.
const hostsOpen = 10_000

// BenchmarkCostOfLooks measures which share of a core looks cost Envoy and the router with
// 10,000 sandboxes that are in use: the CPU time of both while nothing looks, while the
// router looks as it does all the time, and while something is due all the time.
func BenchmarkCostOfLooks(b *testing.B) {
	const phase = 40 * time.Second
	g := startGateway(b)
	reader, _ := reader(b, g.socket())
	var took []time.Duration
	tracker, err := lastactive.New(lastactive.Options{
		ConnectWindow: 5 * time.Second, Now: bootclock.Now,
		Look: func(ctx context.Context) (look.Look, error) {
			began := time.Now()
			l, err := reader.Look(ctx)
			took = append(took, time.Since(began))
			return l, err
		},
	})
	require.NoError(b, err)
	g.openMany(tracker)
	g.showsOpen(reader, hostsOpen)

	measure := func(run func(ctx context.Context)) (envoy, router float64) {
		ctx, cancel := context.WithTimeout(context.Background(), phase)
		defer cancel()
		took = nil
		e, r := g.cpu(), ownCPU()
		began := time.Now()
		run(ctx)
		<-ctx.Done()
		return 100 * (g.cpu() - e).Seconds() / time.Since(began).Seconds(), 100 * (ownCPU() - r).Seconds() / time.Since(began).Seconds()
	}
	for range b.N {
		envoy0, router0 := measure(func(context.Context) {})
		for name, due := range map[string]bool{"periodic": false, "due": true} {
			envoy, router := measure(func(ctx context.Context) {
				var all sync.WaitGroup
				defer all.Wait()
				all.Go(func() { tracker.Run(ctx) })
				all.Go(func() {
					for {
						select {
						case <-ctx.Done():
							return
						case <-tracker.LookDone():
							tracker.Report(false)
						}
					}
				})
				for due && ctx.Err() == nil { // as the allocator asks
					_, _ = tracker.Ask(ctx, nil)
					select {
					case <-ctx.Done():
					case <-time.After(min(40*tracker.Report(false).Took, 10*time.Second)):
					}
				}
				<-ctx.Done()
			})
			b.ReportMetric(envoy-envoy0, name+"-envoy-%")
			b.ReportMetric(router-router0, name+"-router-%")
			b.ReportMetric(float64(len(took)), name+"-looks")
			var all time.Duration
			for _, d := range took {
				all += d
			}
			b.ReportMetric(float64(all.Milliseconds())/float64(max(1, len(took))), name+"-ms/look")
		}
	}
}

// openMany opens a request to each of many pods: addresses of the loopback network, on
// which one server listens.
func (g *gateway) openMany(tracker *lastactive.Tracker) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	require.NoError(g, err)
	port := l.Addr().(*net.TCPAddr).Port
	ctx, cancel := context.WithCancel(context.Background())
	server := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-ctx.Done():
		}
	})}
	var all sync.WaitGroup
	all.Go(func() { _ = server.Serve(l) })
	// HTTP/2, because a process may have too few files for a connection of each.
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	client := http.Client{Transport: transport}
	g.Cleanup(func() {
		cancel()
		server.Close()
		all.Wait()
		transport.CloseIdleConnections()
	})
	room := make(chan struct{}, 100)
	for i := range hostsOpen {
		pod := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(i / 250), byte(1 + i%250)}), uint16(port))
		id := fmt.Sprint("sandbox", i)
		tracker.Expect(id, pod.Addr(), 0)
		e, _ := tracker.Begin(sandboxid.MustKey(id), pod, false)
		e.Read()
		room <- struct{}{}
		all.Go(func() {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+g.addr+"/", http.NoBody)
			if err != nil {
				return
			}
			r.Header.Set("x-envoy-original-dst-host", pod.String())
			time.AfterFunc(50*time.Millisecond, func() { <-room })
			if response, err := client.Do(r); err == nil {
				response.Body.Close()
			}
		})
	}
}

// showsOpen waits until a look shows so many sandboxes open.
func (g *gateway) showsOpen(r *look.Reader, want int) {
	for began := time.Now(); ; time.Sleep(time.Second) {
		l, err := r.Look(context.Background())
		open := 0
		for _, n := range l.Hosts {
			open += n
		}
		if err == nil && open == want {
			return
		}
		require.Less(g, time.Since(began), 2*time.Minute, "%d of %d are open: %v", open, want, err)
	}
}

// cpu is the CPU time of Envoy.
func (g *gateway) cpu() time.Duration {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", g.envoy.Pid()))
	require.NoError(g, err)
	_, rest, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(rest)
	ticks := 0
	for _, i := range []int{11, 12} { // utime and stime
		n, err := strconv.Atoi(fields[i])
		require.NoError(g, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
