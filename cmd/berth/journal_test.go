package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/utils/ptr"

	"github.com/berth-sandbox/berth/allocator"
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
	dump := func(args ...string) (slots []dumped, err error) {
		stdout, err := berth(t, append([]string{"journal", "dump", "-o", "json", "--kubeconfig=" + cluster.Kubeconfig()}, args...)...)
		if stdout != "" {
			require.NoError(t, json.Unmarshal([]byte(stdout), &slots))
		}
		return slots, err
	}
	_, err = dump()
	require.ErrorContains(t, err, "there is no journal in namespace default")

	log, _, err := journal.Open(t.Context(), journal.Options{
		Store: &journal.Objects{Client: clients.Berth, Namespace: "default"}, Valid: func() bool { return true },
		Begin: func(context.Context) error { return nil }, Nonce: func() string { return "n" }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	raw, err := proto.Marshal(&journalv1.Record{Key: "sandbox/k3x9", Term: 1, Counter: 7, State: &journalv1.Record_Sandbox{Sandbox: &journalv1.Sandbox{
		Pool: "python", Phase: journalv1.Phase_PHASE_RELEASED, Reason: "Killed", PodIp: []byte{10, 0, 0, 1}, ClaimedAt: 1795360359627291,
		IdleTimeout: 3600000000, StopAfter: 600000000, AsleepAt: 1795360359627291, Metadata: map[string]string{"at": "7"}, RequestHash: []byte{1, 255},
	}}})
	require.NoError(t, err)
	require.NoError(t, log.Commit(t.Context(), []journal.Record{{Key: "sandbox/k3x9", Term: 1, Counter: 7, Raw: raw}}))
	slots, err := dump()
	require.NoError(t, err)
	require.Len(t, slots, 2, "the term record, and the batch")
	last := slots[1]
	require.Equal(t, uint64(2), last.Position)
	require.Equal(t, uint64(1), last.Term)
	require.Equal(t, []map[string]any{{"key": "sandbox/k3x9", "term": 1.0, "counter": 7.0, "sandbox": map[string]any{
		"pool": "python", "phase": "released", "reason": "Killed", "podIp": "10.0.0.1", "claimedAt": "2026-11-22T15:12:39.627291Z",
		"idleTimeout": "1h0m0s", "stopAfter": "10m0s", "asleepAt": "2026-11-22T15:12:39.627291Z", "metadata": map[string]any{"at": "7"}, "requestHash": "01ff",
	}}}, last.Records)
	slots, err = dump("--key=session/")
	require.NoError(t, err)
	require.Empty(t, slots)
	table, err := berth(t, "journal", "dump", "-o", "wide", "--no-headers", "--key=sandbox/k3", "--kubeconfig="+cluster.Kubeconfig())
	require.NoError(t, err)
	require.Equal(t, `2 1 2 1.7 sandbox/k3x9 asleepAt=2026-11-22T15:12:39.627291Z claimedAt=2026-11-22T15:12:39.627291Z idleTimeout=1h0m0s metadata={"at":"7"} phase=released podIp=10.0.0.1 pool=python reason=Killed requestHash=01ff stopAfter=10m0s`,
		strings.Join(strings.Fields(table), " "))

	// Of a journal that is damaged it shows what can be read.
	require.NoError(t, clients.Berth.Patch(types.MergePatchType).Namespace("default").Resource("journalslots").Name("berth-001").
		Body([]byte(`{"spec":{"data":"bm90IHpzdGQ="}}`)).Do(t.Context()).Error())
	slots, err = dump()
	require.ErrorContains(t, err, "slot 1")
	require.Len(t, slots, 2)
	require.NotEmpty(t, slots[0].Error)
}

func TestJournalIsCheckedAndBegunAnewOnlyWhenThatIsNeeded(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	journalOf := func(args ...string) (string, error) {
		return berth(t, append([]string{"journal"}, append(args, "--kubeconfig="+cluster.Kubeconfig())...)...)
	}
	store := &journal.Objects{Client: clients.Berth, Namespace: "default"}
	open := func() *journal.Log {
		log, _, err := journal.Open(t.Context(), journal.Options{
			Store: store, Valid: func() bool { return true },
			Begin: func(context.Context) error { return nil }, Nonce: func() string { return rand.String(12) }, Log: zap.NewNop(),
		})
		require.NoError(t, err)
		return log
	}
	log := open()
	out, err := journalOf("check")
	require.NoError(t, err)
	require.Equal(t, "Journal "+log.Stamp().Journal+": 256 slots, ends at position 1, term 1.\nThe journal is whole.\n", out)
	_, err = journalOf("begin", "--dry-run")
	require.ErrorContains(t, err, "the journal is intact")

	remove := func(name string) {
		require.NoError(t, clients.Berth.Delete().Namespace("default").Resource("journalslots").Name(name).Do(t.Context()).Error())
	}
	for _, name := range []string{"berth-003", "berth-004", "berth-200"} {
		remove(name)
	}
	out, err = journalOf("check")
	require.ErrorContains(t, err, "slot object is missing: slot 3 of 256")
	require.Contains(t, out, "Missing: berth-003 to berth-004, berth-200.\n")
	before, err := store.Versions(t.Context())
	require.NoError(t, err)
	out, err = journalOf("begin", "--dry-run")
	require.NoError(t, err)
	require.Contains(t, out, "Would be done: made without records: berth-003 to berth-004, berth-200.\n")
	after, err := store.Versions(t.Context())
	require.NoError(t, err)
	require.Equal(t, before, after, "a dry run has changed something")

	leases := clients.Kubernetes.CoordinationV1().Leases("default")
	lease, err := leases.Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "berth-allocator"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("leader"), LeaseDurationSeconds: ptr.To(int32(3600))},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = journalOf("begin", "--timeout=1s")
	require.ErrorIs(t, err, allocator.ErrLeads)
	lease.Spec.HolderIdentity = ptr.To("") // it has given the lease back
	_, err = leases.Update(t.Context(), lease, metav1.UpdateOptions{})
	require.NoError(t, err)
	out, err = journalOf("begin")
	require.NoError(t, err)
	require.Contains(t, out, "begun anew at position 2, term 2.")
	_, err = journalOf("check")
	require.NoError(t, err)
	lease, err = leases.Get(t.Context(), "berth-allocator", metav1.GetOptions{})
	require.NoError(t, err)
	require.Empty(t, *lease.Spec.HolderIdentity, "a leader would have to wait for the lease")
	require.NotEqual(t, log.Stamp().Journal, open().Stamp().Journal)

	// Restored from a backup: it is whole.
	_, err = journalOf("begin", "--restored")
	require.NoError(t, err)
	dump, err := journalOf("dump")
	require.NoError(t, err)
	require.Contains(t, dump, "earlier=true")

	// Objects that are left keep their revisions.
	require.NoError(t, clients.Berth.Delete().Namespace("default").Resource("journalslots").Do(t.Context()).Error())
	_, err = journalOf("check")
	require.ErrorContains(t, err, "no slot exists")
	_, err = journalOf("begin")
	require.NoError(t, err)
	require.Equal(t, uint64(2), open().Term())
}
