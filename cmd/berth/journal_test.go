package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
	"github.com/berth-sandbox/berth/devcluster"
)

func TestJournalDumpShowsWhatTheJournalHolds(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	dump := func() ([]string, error) {
		stdout, err := berth(t, "journal", "dump", "--kubeconfig="+cluster.Kubeconfig())
		return strings.FieldsFunc(stdout, func(r rune) bool { return r == '\n' }), err
	}
	_, err = dump()
	require.ErrorContains(t, err, "there is no journal in namespace default")

	log, _, err := journal.Open(t.Context(), journal.Options{
		Store: &journal.Objects{Client: clients.Berth, Namespace: "default"}, Valid: func() bool { return true },
		Begin: func(context.Context) error { return nil }, Nonce: func() string { return "n" }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	raw, err := proto.Marshal(&journalv1.Record{Key: "sandbox/k3x9", Term: 1, Counter: 7, State: &journalv1.Record_Sandbox{Sandbox: &journalv1.Sandbox{
		Pool: "python", Phase: journalv1.Phase_PHASE_RELEASED, Reason: "Killed",
	}}})
	require.NoError(t, err)
	require.NoError(t, log.Commit(t.Context(), []journal.Record{{Key: "sandbox/k3x9", Term: 1, Counter: 7, Raw: raw}}))
	lines, err := dump()
	require.NoError(t, err)
	require.Len(t, lines, 2, "the term record, and the batch")
	var last dumped
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &last))
	require.Equal(t, uint64(2), last.Position)
	require.Equal(t, uint64(1), last.Term)
	require.Len(t, last.Records, 1)
	require.JSONEq(t, `{"key":"sandbox/k3x9","term":"1","counter":"7","sandbox":{"pool":"python","phase":"PHASE_RELEASED","reason":"Killed"}}`, string(last.Records[0]))

	// Of a journal that is damaged it shows what can be read.
	require.NoError(t, clients.Berth.Patch(types.MergePatchType).Namespace("default").Resource("journalslots").Name("berth-001").
		Body([]byte(`{"spec":{"data":"bm90IHpzdGQ="}}`)).Do(t.Context()).Error())
	lines, err = dump()
	require.ErrorContains(t, err, "slot 1")
	require.Len(t, lines, 2)
	require.Contains(t, lines[0], `"error":`)
}
