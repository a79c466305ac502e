package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// JournalSlot is one place in the ring that the allocator's journal is written
// to. There are as many as spec.slots says; the leader overwrites them in turn,
// each under the resourceVersion it last had. They are never deleted: without one
// of them the allocator does not know what it has promised, and does not start.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=journalslots,singular=journalslot
// +kubebuilder:printcolumn:name="Position",type=integer,JSONPath=`.spec.position`
// +kubebuilder:printcolumn:name="Term",type=integer,JSONPath=`.spec.term`
// +kubebuilder:printcolumn:name="Records",type=integer,JSONPath=`.spec.records`
// +kubebuilder:printcolumn:name="Format",type=integer,JSONPath=`.spec.format`,priority=1
type JournalSlot struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec JournalSlotSpec `json:"spec"`
}

// JournalSlotSpec is one batch of the journal. Read one with "berth journal dump".
type JournalSlotSpec struct {
	// slots is how many slots the ring has, the same in all of them.
	// +kubebuilder:validation:Minimum=2
	Slots int32 `json:"slots"`
	// format is the version of the format of data. An allocator that does not
	// know it does not start.
	// +kubebuilder:validation:Minimum=1
	Format int32 `json:"format"`
	// position of the batch in the log, counted from 1. 0: nothing was written to
	// this slot yet.
	Position int64 `json:"position"`
	// term of the leader that wrote the batch.
	Term int64 `json:"term"`
	// nonce tells this write from every other.
	// +optional
	Nonce string `json:"nonce,omitempty"`
	// records is the number of records in data.
	// +optional
	Records int32 `json:"records,omitempty"`
	// data is the batch: a berth.journal.v1.Batch, compressed with zstd.
	// +optional
	Data []byte `json:"data,omitempty"`
}

// JournalSlotList is a list of JournalSlot.
//
// +kubebuilder:object:root=true
type JournalSlotList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []JournalSlot `json:"items"`
}
