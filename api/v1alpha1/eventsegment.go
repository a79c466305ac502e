package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// EventSegment is a part of the log of events: what happened to sandboxes, for
// GET /events/sandboxes and for webhooks. The leader fills the newest segment and deletes the
// oldest ones. Without segments no promise about a sandbox is lost: see docs/design/events.md.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=eventsegments,singular=eventsegment
// +kubebuilder:printcolumn:name="First",type=integer,JSONPath=`.spec.first`
// +kubebuilder:printcolumn:name="Events",type=integer,JSONPath=`.spec.events`
// +kubebuilder:printcolumn:name="Term",type=integer,JSONPath=`.spec.term`
// +kubebuilder:printcolumn:name="Through",type=string,JSONPath=`.spec.through`,priority=1
type EventSegment struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec EventSegmentSpec `json:"spec"`
}

// EventSegmentSpec is what a segment holds.
type EventSegmentSpec struct {
	// format is the version of the format of data.
	// +kubebuilder:validation:Minimum=1
	Format int32 `json:"format"`
	// first is the number of the first event. Numbers count from 1 and have no gaps.
	// +kubebuilder:validation:Minimum=1
	First int64 `json:"first"`
	// events is how many events data has.
	// +kubebuilder:validation:Minimum=1
	Events int32 `json:"events"`
	// term of the leader that wrote it last.
	// +kubebuilder:validation:Minimum=1
	Term int64 `json:"term"`
	// through is the revision up to which every state of every sandbox is told, as status.revision of
	// a Sandbox: term, then a counter in the term.
	// +kubebuilder:validation:Pattern=`^[0-9]{1,18}\.[0-9]{1,18}$`
	Through string `json:"through"`
	// data has one JSON object a line for each event, compressed with zstd.
	// +kubebuilder:validation:MaxLength=1048576
	Data []byte `json:"data"`
}

// EventSegmentList is a list of EventSegment.
//
// +kubebuilder:object:root=true
type EventSegmentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []EventSegment `json:"items"`
}
