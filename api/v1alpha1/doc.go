// Package v1alpha1 holds Berth's custom resources, group berth.sh:
//
//   - SandboxPool: a pod template and how many pods made from it wait warm.
//   - Sandbox: the record of one sandbox, live or ended. The allocator
//     writes it from committed facts, and it keeps those facts after the pod is
//     gone. Creating one claims nothing.
//
// +kubebuilder:object:generate=true
// +groupName=berth.sh
package v1alpha1
