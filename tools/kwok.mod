// The KWOK whose nodes devcluster has for thousands of pods without processes.
// A module of its own, and not named go.mod, for the reasons given in kube.mod.
module github.com/berth-sandbox/berth/tools/kwok

go 1.26.0

require sigs.k8s.io/kwok v0.8.0
