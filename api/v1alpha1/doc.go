// Package v1alpha1 holds Berth's custom resources, group berth.sh:
//
//   - SandboxPool: a pod template and how many pods made from it wait warm.
//   - Sandbox: the record of one sandbox, live or ended. It is written from
//     facts the allocator has committed and is the place those facts stay
//     after the pod is gone. Nobody claims by creating one.
//
// +kubebuilder:object:generate=true
// +groupName=berth.sh
package v1alpha1
