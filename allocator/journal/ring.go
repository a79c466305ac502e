package journal

import "bytes"

// Record is the state of one thing, as far as the log looks into it.
type Record struct {
	// Key names the thing.
	Key string
	// Term and Counter are the revision.
	Term, Counter uint64
	// Raw is the encoded berth.journal.v1.Record, which has all of them in it.
	Raw []byte
}

// ring knows, of every slot, which records in it are still needed.
type ring struct {
	// held are the keys that were written at each slot's position. Some of them
	// have been overtaken since.
	held [][]string
	// newest is the latest record of each key that is not settled.
	newest map[string]newest
	bytes  int // of newest
}

type newest struct {
	Record
	position uint64
}

func newRing(slots int) *ring {
	return &ring{held: make([][]string, slots), newest: map[string]newest{}}
}

func (r *ring) slot(position uint64) int { return int(position % uint64(len(r.held))) }

// put notes that a batch was committed at a position: what it carried on from
// the slot before, and what was new in it.
func (r *ring) put(position uint64, carried, records []Record) {
	keys := make([]string, 0, len(carried)+len(records))
	for _, rec := range carried {
		// What was settled meanwhile is needed no more.
		if n, ok := r.newest[rec.Key]; ok {
			n.position = position
			r.newest[rec.Key] = n
			keys = append(keys, rec.Key)
		}
	}
	for _, rec := range records {
		r.bytes -= len(r.newest[rec.Key].Raw)
		r.newest[rec.Key] = newest{rec, position}
		r.bytes += len(rec.Raw)
		keys = append(keys, rec.Key)
	}
	r.held[r.slot(position)] = keys
}

// merge notes what was found at a position. Positions come in any order. The records
// point into a buffer that is used again.
func (r *ring) merge(position uint64, records []Record) {
	keys := make([]string, 0, len(records))
	for _, rec := range records {
		n, known := r.newest[rec.Key]
		if known {
			rec.Key = n.Key // of the many copies of a key one stays
		}
		keys = append(keys, rec.Key)
		if known && n.position > position {
			continue
		}
		r.bytes += len(rec.Raw) - len(n.Raw)
		rec.Raw = bytes.Clone(rec.Raw)
		r.newest[rec.Key] = newest{rec, position}
	}
	r.held[r.slot(position)] = keys
}

// carried returns the records that are needed and would be lost with what the
// slot holds when a batch is written at position.
func (r *ring) carried(position uint64) []Record { return r.needed(r.slot(position)) }

// needed returns the records in a slot that are needed.
func (r *ring) needed(slot int) []Record {
	var needed []Record
	seen := map[string]bool{}
	for _, key := range r.held[slot] {
		if n, ok := r.newest[key]; ok && r.slot(n.position) == slot && !seen[key] {
			seen[key] = true
			needed = append(needed, n.Record)
		}
	}
	return needed
}

// settle notes that the key's state of this revision, and what came before, is
// safe elsewhere.
func (r *ring) settle(key string, term, counter uint64) {
	if n, ok := r.newest[key]; ok && (n.Term < term || n.Term == term && n.Counter <= counter) {
		delete(r.newest, key)
		r.bytes -= len(n.Raw)
	}
}
