package network

import (
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Bytes in a cut direction do not arrive until the cut ends.
func TestHeldBackBytesArriveAfterTheCut(t *testing.T) {
	n := New(t)
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	received := make(chan string, 10)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				buffer := make([]byte, 10)
				for {
					count, err := c.Read(buffer)
					if err != nil {
						return
					}
					received <- string(buffer[:count])
					_, _ = c.Write(buffer[:count])
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = echo.Close()
		n.cancel()
		serving.Wait()
	})
	self := func() map[string][]int { return map[string][]int{"other": {1 << 30}, "self": {os.Getpid()}} }
	at, err := n.Relay(echo.Addr().String(),
		func(client, listener netip.AddrPort) string { return Owner(client, listener, self) })
	require.NoError(t, err)
	c, err := net.Dial("tcp", at.String())
	require.NoError(t, err)
	defer c.Close()
	answers := make(chan string, 10)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		buffer := make([]byte, 10)
		for {
			count, err := c.Read(buffer)
			if err != nil {
				return
			}
			answers <- string(buffer[:count])
		}
	}()
	send := func(text string) {
		t.Helper()
		_, err := c.Write([]byte(text))
		require.NoError(t, err)
	}
	send("one")
	require.Equal(t, "one", <-received)
	require.Equal(t, "one", <-answers)

	n.Cut("other", Cut{From: true, To: true}) // is nothing to us
	n.Cut("self", Cut{To: true})
	send("two")
	require.Equal(t, "two", <-received)
	require.Empty(t, answers)
	n.Cut("self", Cut{From: true})
	require.Equal(t, "two", <-answers)
	send("three")
	require.Empty(t, received)
	n.Cut("self", Cut{})
	require.Equal(t, "three", <-received)
	require.Equal(t, "three", <-answers)

	n.Reset("self")
	<-reading
}
