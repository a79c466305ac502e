package lastactive

import (
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/lastactive/sockets"
)

// bucket is the leaky bucket of one connection. It holds minBytes and loses minBytes per
// minute. Bytes that fill it count as use.
type bucket struct {
	at    time.Duration // of the newest reading
	bytes uint64        // total at that reading
	level float64
}

// connections are the kernel's counts for connections to pods. The zero value stands for a
// look that did not ask the kernel.
type connections struct {
	to      map[netip.Addr][]sockets.Socket
	buckets map[uint64]bucket // by cookie
	err     error
}

func (t *Tracker) connections() connections {
	all, err := t.o.Sockets()
	c := connections{map[netip.Addr][]sockets.Socket{}, map[uint64]bucket{}, err}
	for _, s := range all {
		c.to[s.Remote.Addr()] = append(c.to[s.Remote.Addr()], s)
	}
	return c
}

// fillBucket reports whether the bytes moved have filled the bucket of a connection to e.
// before has the buckets of the reading before. If before is nil, there was none, and every
// connection may have been in use until now. The bucket of a new connection starts full.
func (c *connections) fillBucket(before map[uint64]bucket, e *Entry, now time.Duration) (filled bool) {
	for _, s := range c.to[e.addr] {
		full := float64(e.minBytes)
		b, ok := before[s.Cookie]
		if !ok {
			b = bucket{now, s.Bytes, full}
		}
		moved := s.Bytes - b.bytes
		b.level = min(max(b.level-full*(now-b.at).Minutes(), 0)+float64(moved), full)
		filled = filled || before == nil || moved > 0 && b.level == full
		c.buckets[s.Cookie] = bucket{now, s.Bytes, b.level}
	}
	return filled
}
