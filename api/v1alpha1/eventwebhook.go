package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// EventWebhook is a URL to which the leader sends the events of the sandboxes of a team. Its name
// is the ID of the webhook. The API makes, changes and deletes it (/events/webhooks). A change that
// another client makes counts for the next leader.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=eventwebhooks,singular=eventwebhook
// +kubebuilder:printcolumn:name="Team",type=string,JSONPath=`.spec.team`
// +kubebuilder:printcolumn:name="Title",type=string,JSONPath=`.spec.name`
// +kubebuilder:printcolumn:name="URL",type=string,JSONPath=`.spec.url`
// +kubebuilder:printcolumn:name="Enabled",type=boolean,JSONPath=`.spec.enabled`
// +kubebuilder:printcolumn:name="Through",type=integer,JSONPath=`.status.through`,priority=1
type EventWebhook struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec EventWebhookSpec `json:"spec"`
	// +optional
	Status EventWebhookStatus `json:"status,omitzero"`
}

// EventWebhookSpec is what its team has asked for.
type EventWebhookSpec struct {
	// team is that of the API key that made it; empty for an API without keys.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Team string `json:"team,omitempty"`
	// name is for people.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Name string `json:"name"`
	// url gets a POST for each event.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	URL string `json:"url"`
	// enabled: events are sent.
	Enabled bool `json:"enabled"`
	// events are the types of events that are sent.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +listType=set
	Events []string `json:"events"`
	// secret is the secret of the signatures, sealed with a key that is derived from the allocators'
	// --access-key-file. With another key no event is sent until the secret is set again.
	// +kubebuilder:validation:MaxLength=4096
	Secret []byte `json:"secret"`
}

// EventWebhookStatus is how far it is.
type EventWebhookStatus struct {
	// through is the number of the event up to which all events are delivered, given up or of no
	// interest.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Through int64 `json:"through,omitempty"`
}

// EventWebhookList is a list of EventWebhook.
//
// +kubebuilder:object:root=true
type EventWebhookList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []EventWebhook `json:"items"`
}
