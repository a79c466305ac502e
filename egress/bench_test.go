package egress_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/envoy"
)

// BenchmarkRequest is one plain request through an egress gateway on a connection that stays open, and the same beside
// it through the same Envoy as a plain forward proxy whose ext_proc, over grpc-go, answers each request alike and keeps
// no stream. It reports the CPU time of Envoy, and that of the router with client and origin.
func BenchmarkRequest(b *testing.B) {
	b.Run("egress", func(b *testing.B) {
		w := newWorld(b)
		abc := sandbox(b, "abc", abcAddr, w.ports, "web.example.com")
		require.NoError(b, w.replace([]egress.Sandbox{abc}))
		w.measure(b, "web.example.com:"+w.webPort)
	})
	b.Run("plain", func(b *testing.B) {
		w := newWorld(b)
		s, g := startScript(b, w.secure, closesStreams(b))
		at := w.web.Listener.Addr().String()
		s.set(nil, envoy.MetadataDst, at, envoy.MetadataID, "abc", envoy.MetadataIncarnation, "0")
		g.measure(b, at)
	})
}

// closesStreams changes ext_proc so that Envoy ends a stream when it has read the answer.
func closesStreams(b *testing.B) func(*bootstrapv3.Bootstrap) {
	return withManager(b, func(manager *hcmv3.HttpConnectionManager) {
		var proc procv3.ExternalProcessor
		require.NoError(b, manager.HttpFilters[0].GetTypedConfig().UnmarshalTo(&proc))
		proc.ProcessingMode.ResponseTrailerMode = procv3.ProcessingMode_SKIP
		require.NoError(b, manager.HttpFilters[0].GetTypedConfig().MarshalFrom(&proc))
	})
}

func (g *gateway) measure(b *testing.B, host string) {
	c := g.dial(abcAddr)
	r := bufio.NewReader(c)
	request := head("GET http://"+host+"/", "abc")
	once := func() {
		_, err := io.WriteString(c, request)
		require.NoError(b, err)
		response, err := http.ReadResponse(r, nil)
		require.NoError(b, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(b, err)
		require.Equal(b, http.StatusOK, response.StatusCode)
	}
	once()
	require.NoError(b, c.SetDeadline(time.Now().Add(10*time.Minute)))
	ofEnvoy, ofOthers := cpu(b, g.process.Pid()), ran(b)
	b.ResetTimer()
	for range b.N {
		once()
	}
	b.StopTimer()
	perRequest := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / float64(b.N) }
	b.ReportMetric(perRequest(cpu(b, g.process.Pid())-ofEnvoy), "envoy-ns/op")
	b.ReportMetric(perRequest(ran(b)-ofOthers), "others-ns/op")
}

// cpu returns what the threads of a process have run (proc(5), schedstat).
func cpu(b *testing.B, pid int) (total time.Duration) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	require.NoError(b, err)
	require.NotEmpty(b, threads)
	for _, thread := range threads {
		raw, err := os.ReadFile(thread)
		require.NoError(b, err)
		var part time.Duration
		_, err = fmt.Sscan(string(raw), &part)
		require.NoError(b, err)
		total += part
	}
	return total
}

// ran returns what this process has run.
func ran(b *testing.B) time.Duration {
	var usage syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
