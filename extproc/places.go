package extproc

import (
	"sync"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// maxHeld bounds the requests that wait for a leader, or for sandboxes that are starting or
// quiesced. Each holds a stream here, and memory in Envoy.
const maxHeld = 2000

// places are those of requests that wait. One sandbox alone can have half of them, and each of n sandboxes
// 1/(n+1). It may be used concurrently.
type places struct {
	mu    sync.Mutex
	taken int
	by    map[sandboxid.Key]int // what is not 0
}

// take takes a place for a request for a sandbox that has fewer than are free.
func (p *places) take(id sandboxid.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.by[id] >= maxHeld-p.taken {
		return false
	}
	if p.by == nil {
		p.by = map[sandboxid.Key]int{}
	}
	p.taken++
	p.by[id]++
	return true
}

func (p *places) giveBack(id sandboxid.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken--
	if p.by[id]--; p.by[id] == 0 {
		delete(p.by, id)
	}
}

// len is how many are taken.
func (p *places) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken
}
