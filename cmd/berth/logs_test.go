package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

// logOf is a log whose lines have the times of a program that writes 400 lines in a millisecond.
func logOf(lines int) (all []openapi.SandboxLogEntry) {
	for i := range lines {
		all = append(all, openapi.SandboxLogEntry{
			Timestamp: noon.Add(time.Duration(i/400)*time.Millisecond + time.Duration(i%400/2)), Message: fmt.Sprintf("line %d", i),
			Level: openapi.SandboxLogEntryLevelInfo, Fields: map[string]string{},
		})
	}
	return all
}

func TestLogsOfATimeHasEveryLineOnce(t *testing.T) {
	s, url := serve(t)
	s.logs = logOf(4500)
	stdout, err := berth(t, "logs", first, "--api-url="+url, "--since=1m")
	require.NoError(t, err)
	var want strings.Builder
	for i := range s.logs {
		fmt.Fprintln(&want, s.logs[i].Message)
	}
	require.Equal(t, want.String(), stdout)
}

func TestLogsSaysWhereLinesMayBeMissing(t *testing.T) {
	s, url := serve(t)
	s.logs = logOf(3)
	for range 2 * maxLogLines {
		s.logs = append(s.logs, s.logs[2])
	}
	last := s.logs[2]
	last.Timestamp = last.Timestamp.Add(time.Second)
	s.logs = append(s.logs, last)
	stdout, stderr, err := command(t.Context(), "logs", first, "--api-url="+url, "--since=1m")
	require.NoError(t, err)
	require.Contains(t, stderr, "may be missing")
	require.Equal(t, maxLogLines+1, strings.Count(stdout, "\n"))
}

func TestFollowedLogGoesOnUntilTheSandboxEnds(t *testing.T) {
	s, url := serve(t)
	s.logs = logOf(1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, write := io.Pipe()
	var stderr bytes.Buffer
	done := make(chan error, 1)
	go func() {
		c := logsCommand{ID: first, Follow: true, Tail: 1, apiFlags: apiFlags{APIURL: url, RequestTimeout: time.Minute}}
		done <- c.Run(ctx, newOutput(write, &stderr, time.Now))
		write.Close()
	}()
	line := make([]byte, len("line 0\n"))
	for i := range 3 {
		_, err := io.ReadFull(read, line)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("line %d\n", i), string(line))
		s.mu.Lock()
		if s.logs = logOf(i + 2); i == 2 {
			s.logs, s.ended = logOf(3), true
		}
		s.mu.Unlock()
	}
	require.NoError(t, <-done)
	require.Equal(t, first+" has ended\n", stderr.String())
}
