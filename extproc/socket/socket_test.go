package socket

import (
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConnectionsAboveTheBoundAreClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(t.Context(), path)
	require.NoError(t, err)
	all := NewConnections(zap.NewNop())
	l = all.Limit(l)
	accepted := make(chan net.Conn, 2)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	defer func() { require.NoError(t, l.Close()); <-ended }()
	dial := func() net.Conn {
		c, err := net.Dial("unix", path)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		require.NoError(t, c.SetDeadline(time.Now().Add(20*time.Second)))
		return c
	}
	all.open.Store(MaxConnections - 1)
	dial()
	last := <-accepted
	_, err = io.ReadAll(dial())
	require.NoError(t, err, "it must be closed at once")
	require.Equal(t, MaxConnections, all.Open())
	require.NoError(t, last.Close())
	_ = last.Close()
	require.Equal(t, MaxConnections-1, all.Open())
	dial()
	(<-accepted).Close()
}
