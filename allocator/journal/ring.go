package journal

// Record is the state of one thing, as far as the log decodes it.
type Record struct {
	// Key names the thing.
	Key string
	// Term and Counter are the revision of the state.
	Term, Counter uint64
	// Format is the lowest format of a batch that may hold it; 0: every format may.
	Format int
	// Raw is the encoded berth.journal.v1.Record, including the other fields.
	Raw []byte
	// Joined: Commit writes it in one batch with the record before it. Records that are joined have
	// at most MaxJoined bytes. Open does not fill it in.
	Joined bool
}

// ring tracks which records of each slot are still needed.
type ring struct {
	// held are the keys in each slot's batch. Later batches may have replaced some of them.
	held [][]string
	// newest is the latest unsettled record of each key.
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

// put records a committed batch: the carried records of the slot's former batch, and the new ones.
func (r *ring) put(position uint64, carried, records []Record) {
	keys := make([]string, 0, len(carried)+len(records))
	for _, rec := range carried {
		// A record settled meanwhile is no longer needed.
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

// merge records a batch that was read. Batches come in any order.
func (r *ring) merge(position uint64, records []Record) {
	keys := make([]string, 0, len(records))
	for _, rec := range records {
		n, known := r.newest[rec.Key]
		if known {
			rec.Key = n.Key // keep one copy of each key
		}
		keys = append(keys, rec.Key)
		if known && n.position > position {
			continue
		}
		r.bytes += len(rec.Raw) - len(n.Raw)
		r.newest[rec.Key] = newest{rec, position}
	}
	r.held[r.slot(position)] = keys
}

// carried returns the needed records that a batch at position would overwrite.
func (r *ring) carried(position uint64) []Record { return r.needed(r.slot(position)) }

// needed returns the records of a slot that are neither replaced nor settled.
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

// settle drops the key's state of this revision, and all earlier ones.
func (r *ring) settle(key string, term, counter uint64) {
	if n, ok := r.newest[key]; ok && (n.Term < term || n.Term == term && n.Counter <= counter) {
		delete(r.newest, key)
		r.bytes -= len(n.Raw)
	}
}
