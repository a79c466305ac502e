package egress_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress"
)

func (w *world) counts(id string) egress.Counts {
	counts, _ := w.router.Counts(id)
	return counts
}

// Invariant: P39
func TestBytesOfTunnelsAndRequestsAreCounted(t *testing.T) {
	w := newWorld(t, withManager(t, func(m *hcmv3.HttpConnectionManager) {
		m.AccessLogOptions.AccessLogFlushInterval = durationpb.New(100 * time.Millisecond)
	}))
	const n = 1 << 20
	open := w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	sent := make(chan error, 1)
	go func() {
		_, err := io.WriteString(open, strings.Repeat("x", n))
		sent <- err
	}()
	_, err := io.CopyN(io.Discard, open.r, n)
	require.NoError(t, err)
	require.NoError(t, <-sent)
	const all = n + uint64(len("ping\n"))
	eventually(t, "the bytes of the open tunnel", func() bool {
		c := w.counts("abc")
		return c.Sent == all && c.Received == all
	})
	require.Equal(t, 1, w.counts("abc").Open)
	open.Close()
	eventually(t, "its end", func() bool { return w.counts("abc").Open == 0 })

	// What a client writes into a request, text that is none too, does not keep its bytes from being counted.
	path := "/" + strings.Repeat("p", 30_000)
	for range 3 {
		a := w.raw(abcAddr, head("GET http://web.example.com:"+w.webPort+path, "abc", "User-Agent: \xff", "Referer: \xfe",
			"X-Request-Id: \xff", "X-Forwarded-For: 127.0.0.3"))
		require.Equal(t, http.StatusOK, a.code, a.body)
	}
	eventually(t, "the bytes of the requests", func() bool { return w.counts("abc").Sent > all+3*30_000 })
	c := w.counts("abc")
	require.Less(t, c.Sent, all+3*31_000, "bytes are counted once")
	require.Less(t, c.Received, all+3*1000)
	require.Zero(t, w.counts("def").Sent)
}

// Invariant: P39
func TestBytesOfAnEarlierPodAreNotCounted(t *testing.T) {
	w := newWorld(t)
	tunnel := w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	pod := sandbox(t, "abc", abcAddr, w.ports)
	pod.Incarnation++
	require.NoError(t, w.set(pod)) // it ends the tunnel, and Envoy says the bytes of the tunnel after its end
	tunnel.isCut()
	w.get(defAddr, "def", "web.example.com:"+w.webPort, "/")
	eventually(t, "the bytes of the later request", func() bool { return w.counts("def").Sent > 0 })
	require.Zero(t, w.counts("abc").Sent)
}

// Invariant: P39
func TestLatestDestinationsAreKeptByVerdict(t *testing.T) {
	w := newWorld(t)
	for range 3 {
		w.get(abcAddr, "abc", "web.example.com:"+w.webPort, "/")
	}
	for i := range 200 {
		w.connect(abcAddr, "abc", fmt.Sprintf("web.example.com:%d", i+1))
	}
	c := w.counts("abc")
	require.EqualValues(t, 3, c.Admitted)
	require.EqualValues(t, 200, c.Refused)
	require.Len(t, c.Destinations, 33)
	require.Equal(t, "web.example.com:200", c.Destinations[0].String())
	require.Equal(t, apierror.EgressRefused, c.Destinations[0].Reason)
	last := c.Destinations[32]
	require.Equal(t, "web.example.com:"+w.webPort, last.String(), "refusals hide nothing that leaves")
	require.Equal(t, []any{apierror.Reason(""), uint64(3)}, []any{last.Reason, last.Count})
	require.Less(t, last.Age, time.Minute)

	pod := sandbox(t, "abc", abcAddr, w.ports)
	require.NoError(t, w.set(pod))
	require.EqualValues(t, 3, w.counts("abc").Admitted, "the same pod")
	pod.Incarnation++
	require.NoError(t, w.set(pod))
	require.Empty(t, w.counts("abc"), "another pod")
}

// Envoy sends many messages at one time when many requests end.
//
// Invariant: P39
func TestBytesOfManyRequestsAtOnceAreCounted(t *testing.T) {
	w := newWorld(t)
	c := w.dial(abcAddr)
	request := head("GET http://web.example.com:"+w.webPort+"/"+strings.Repeat("p", 5000), "abc")
	const n = 500
	sent := make(chan error, 1)
	go func() {
		_, err := io.WriteString(c, strings.Repeat(request, n))
		sent <- err
	}()
	r := bufio.NewReader(c)
	for range n {
		response, err := http.ReadResponse(r, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
	}
	require.NoError(t, <-sent)
	eventually(t, "all of them", func() bool { return w.counts("abc").Sent >= n*5000 })
	require.Less(t, w.counts("abc").Sent, uint64(n*5100))
}
