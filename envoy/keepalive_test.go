package envoy_test

import (
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// When a pod vanishes with its node, its connections and requests stay open at Envoy until the
// kernel notices.
// Invariant: I4
func TestSilentConnectionsToPodsAreProbed(t *testing.T) {
	g := startGateway(t)
	arrived, release := make(chan struct{}), make(chan struct{})
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-release }))
	g.router.set(g.to(p.addr.String()))
	// Envoy's end of an established connection to the pod: the kind of the timer that runs
	// (2: keepalive), and in how many hundredths of a second it is due (proc(5)).
	timer := regexp.MustCompile(fmt.Sprintf(`(?m)^ *\d+: [0-9A-F:]+ 0100007F:%04X 01 [0-9A-F:]+ ([0-9A-F]+):([0-9A-F]+) `, p.addr.Port()))
	for connections, contentType := range []string{"text/plain", "application/grpc"} { // HTTP/1.1 and HTTP/2 to the pod
		var client sync.WaitGroup
		client.Go(func() { g.do(g.request(host, "/", http.Header{"Content-Type": {contentType}})) })
		<-arrived
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			raw, err := os.ReadFile("/proc/net/tcp")
			require.NoError(c, err)
			timers := timer.FindAllStringSubmatch(string(raw), -1)
			require.Len(c, timers, connections+1)
			for _, found := range timers {
				due, err := strconv.ParseInt(found[2], 16, 64)
				require.NoError(c, err)
				require.Equal(c, "02", found[1])
				require.LessOrEqual(c, due, int64(1500))
			}
		}, time.Minute, 10*time.Millisecond, contentType)
		release <- struct{}{}
		client.Wait()
	}
}
