package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Group is the API group of Berth's resources.
const Group = "berth.sh"

// GroupVersion returns the group and version of the types in this package.
func GroupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: Group, Version: "v1alpha1"}
}

// AddToScheme registers the types of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion(), &SandboxPool{}, &SandboxPoolList{}, &Sandbox{}, &SandboxList{}, &JournalSlot{}, &JournalSlotList{}, &EventSegment{}, &EventSegmentList{}, &EventWebhook{}, &EventWebhookList{})
	metav1.AddToGroupVersion(s, GroupVersion())
	return nil
}
