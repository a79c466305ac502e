package fact

import (
	"cmp"
	"strconv"
	"strings"
)

// PoolKey names a pool.
type PoolKey struct{ Namespace, Name string }

// PodKey identifies one life of a pod. Names are used again, UIDs are not.
type PodKey struct {
	Namespace, Name, UID string
	// Life is 0 for a pod that cannot be recycled, which has one life. The lives of other pods count from 1.
	// It is negative for a life that no allocator has begun.
	Life int
}

// PodKeyOf is the inverse of ID.
func PodKeyOf(namespace, name, id string) PodKey {
	key := PodKey{Namespace: namespace, Name: name, UID: id}
	if at := strings.LastIndexByte(id, '/'); at >= 0 {
		if n, err := strconv.Atoi(id[at+1:]); err == nil && n >= 0 && strconv.Itoa(n) == id[at+1:] {
			key.UID, key.Life = id[:at], n+1
		}
	}
	return key
}

// ID is what records name the pod by: its UID, and the number of lives before this one if it can be recycled.
func (k PodKey) ID() string {
	if k.Life == 0 {
		return k.UID
	}
	return k.UID + "/" + strconv.Itoa(k.Life-1)
}

// Whole returns the key of the pod in all of its lives.
func (k PodKey) Whole() PodKey {
	k.Life = 0
	return k
}

// ComparePods orders pods by UID and life.
func ComparePods(a, b PodKey) int {
	return cmp.Or(strings.Compare(a.UID, b.UID), cmp.Compare(a.Life, b.Life))
}

// ComparePools orders pools by namespace and name.
func ComparePools(a, b PoolKey) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

// Revision is a term and a counter within it.
type Revision struct{ Term, Counter uint64 }

// Less reports whether r is older than o.
func (r Revision) Less(o Revision) bool {
	return r.Term < o.Term || r.Term == o.Term && r.Counter < o.Counter
}

// MaxTerm bounds terms that are read from Sandbox objects and routers. Terms count changes
// of leaders, so a higher one is an error. The next leader has a higher term than any it has
// read, and a term must fit into an int64.
const MaxTerm = 1 << 53
