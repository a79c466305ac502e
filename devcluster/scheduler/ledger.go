package scheduler

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// ledger counts the pods of each node: pods that the watch has shown there, and pods
// that are being bound.
type ledger struct {
	mu      sync.Mutex
	node    map[types.UID]string // of a pod that counts
	count   map[string]int       // pods by node
	waiting map[cache.ObjectName]struct{}
}

func newLedger() *ledger {
	return &ledger{node: map[types.UID]string{}, count: map[string]int{}, waiting: map[cache.ObjectName]struct{}{}}
}

// saw records a pod that the watch shows, and reports whether that made room.
func (l *ledger) saw(pod *corev1.Pod) (room bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case terminal(pod.Status.Phase):
		return l.remove(pod.UID)
	case pod.Spec.NodeName != "":
		l.put(pod.UID, pod.Spec.NodeName)
	}
	return false
}

// forget removes a pod from its node, and reports whether it was on one.
func (l *ledger) forget(uid types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.remove(uid)
}

// place puts a pod on the node that choose returns for the counts. If choose returns
// none, the pod is in the next result of woken. A change of anything that choose
// reads must be followed by a call of woken, or the pod may wait for a change that
// has already happened.
func (l *ledger) place(key cache.ObjectName, uid types.UID, choose func(count map[string]int) string) (node string,
	placed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.node[uid] != "" {
		return "", false
	}
	node = choose(l.count)
	if node == "" {
		l.waiting[key] = struct{}{}
	} else {
		l.put(uid, node)
	}
	return node, true
}

// woken returns the pods that were left without a node, once.
func (l *ledger) woken() []cache.ObjectName {
	l.mu.Lock()
	defer l.mu.Unlock()
	keys := make([]cache.ObjectName, 0, len(l.waiting))
	for key := range l.waiting {
		keys = append(keys, key)
	}
	clear(l.waiting)
	return keys
}

func (l *ledger) put(uid types.UID, node string) {
	l.remove(uid)
	l.node[uid] = node
	l.count[node]++
}

func (l *ledger) remove(uid types.UID) bool {
	node, ok := l.node[uid]
	if !ok {
		return false
	}
	delete(l.node, uid)
	if l.count[node]--; l.count[node] == 0 {
		delete(l.count, node)
	}
	return true
}
