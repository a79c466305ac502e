package v1alpha1

import (
	"cmp"
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Bounds of PoolSnapshot.MaxBytes, and defaults.
var (
	leastSnapshot   = resource.MustParse("1Ki")
	mostSnapshot    = resource.MustParse("64Gi")
	defaultSnapshot = resource.MustParse("1Gi")
)

const defaultSnapshotFiles = 100_000

// Snapshots returns what a snapshot of a sandbox of the pool keeps. No paths are the home of the agent's default user.
func (s *SandboxPoolSpec) Snapshots() (paths []string, maxBytes int64, maxFiles int) {
	p := s.Snapshot
	if p == nil {
		p = &PoolSnapshot{}
	}
	most := &defaultSnapshot
	if p.MaxBytes != nil {
		most = p.MaxBytes
	}
	return p.Paths, most.Value(), int(cmp.Or(p.MaxFiles, defaultSnapshotFiles))
}

// CheckSnapshot returns an error that names the field of spec.snapshot with a size that is not allowed.
func (s *SandboxPoolSpec) CheckSnapshot() error {
	if p := s.Snapshot; p != nil && p.MaxBytes != nil && (p.MaxBytes.Cmp(leastSnapshot) < 0 || p.MaxBytes.Cmp(mostSnapshot) > 0) {
		return fmt.Errorf("spec.snapshot.maxBytes: %s: must be %s to %s", p.MaxBytes, &leastSnapshot, &mostSnapshot)
	}
	return nil
}
