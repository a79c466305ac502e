package main

import (
	"bytes"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/history"
)

// write records a history in which a sandbox is claimed and answers by a pod.
func write(t *testing.T, suite history.Suite, pod string) string {
	t.Helper()
	log, err := history.Create(filepath.Join(t.TempDir(), "history.jsonl"), history.Event{
		Kind: history.Run, Began: time.Hour, Settings: &history.Settings{Suite: suite, Seed: 7},
	})
	require.NoError(t, err)
	log.Add(history.Event{Kind: history.Claim, Claim: "k", Code: http.StatusCreated, Sandbox: "a", Pod: "pod-a", Began: 1,
		Ended: 2})
	log.Add(history.Event{Kind: history.Request, Request: "1", Code: http.StatusOK, Sandbox: "a", Pod: pod, Began: 3,
		Ended: 4})
	require.NoError(t, log.Close())
	return log.Name()
}

func TestRecordedHistoriesAreJudgedByTheirSuite(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run([]string{write(t, history.Routing, "pod-a")}, &out))
	for _, want := range []string{"suite routing, seed 7, 3 events", "judge wrong-pod     0 violations",
		"judge unserved      0 violations"} {
		require.Contains(t, out.String(), want)
	}
	out.Reset()
	bad := write(t, history.Routing, "pod-b")
	require.ErrorContains(t, run([]string{write(t, history.Routing, "pod-a"), bad}, &out), bad+": 1 violations")
	require.Contains(t, out.String(), "    wrong pod: request 1")
	require.Error(t, run([]string{write(t, "other", "pod-a")}, &out))
	require.Error(t, run([]string{filepath.Join(t.TempDir(), "none")}, &out))
	require.Error(t, run(nil, &out))
}
