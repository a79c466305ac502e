package harness

import (
	"math/rand/v2"
	"sync"
	"time"
)

// Random returns numbers that are the same for the same seed and name.
func Random(seed uint64, name string) *rand.Rand {
	sum := seed
	for _, b := range []byte(name) {
		sum = sum*31 + uint64(b)
	}
	return rand.New(rand.NewPCG(seed, sum))
}

// Within returns a duration from 0 to less than most. most must be above 0.
func Within(random *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(random.Int64N(int64(most)))
}

// occupy locks one of several mutexes, a free one if there is one, and returns its index.
func occupy(random *rand.Rand, all []*sync.Mutex) int {
	first := random.IntN(len(all))
	for i := range all {
		if k := (first + i) % len(all); all[k].TryLock() {
			return k
		}
	}
	all[first].Lock()
	return first
}
