package main

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/canary"
)

// Invariant: P37
func TestOpenNetworkKeepsTheAgentFromBeingInstalled(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	at := listener.Addr().String()
	targets := []canary.Target{{What: "the API server", Network: "tcp", Address: at}}
	message := filepath.Join(t.TempDir(), "message")
	err = awaitClosed(t.Context(), nil, nil, targets, 0, message)
	require.ErrorContains(t, err, canary.Failed+"the pod reaches the API server")
	written, err := os.ReadFile(message)
	require.NoError(t, err)
	require.Contains(t, string(written), canary.Failed+"the pod reaches the API server", "the allocator looks for the begin")
	require.NoError(t, os.Remove(message))

	signals := make(chan os.Signal, 2)
	signals <- syscall.SIGUSR1
	signals <- syscall.SIGTERM
	require.Error(t, awaitClosed(t.Context(), signals, nil, targets, time.Hour, message))
	require.NoFileExists(t, message, "it was told to end")

	require.NoError(t, listener.Close())
	require.NoError(t, awaitClosed(t.Context(), nil, nil, targets, 0, message))
	require.NoError(t, new(installCommand).closed(t.Context(), nil), "a pod that may reach more tries nothing")
}
