package lastactive

import (
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/lastactive/sockets"
)

// bucket is one connection. It holds as many bytes as have to move in a minute, and loses
// as many a minute. Bytes that fill it are use.
type bucket struct {
	at    time.Duration // of the newest reading
	bytes uint64        // that had moved in all by then
	level float64
}

// connections are what the kernel says of those to pods. The zero value is of a look at
// which it was not asked.
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

// enough reports whether bytes have filled the bucket of a connection to e. before are the
// buckets at the reading before; nil: there was none, and every connection may have been in
// use until now. A connection that is new begins with a full bucket.
func (c *connections) enough(before map[uint64]bucket, e *Entry, now time.Duration) (yes bool) {
	for _, s := range c.to[e.addr] {
		full := float64(e.minBytes)
		b, ok := before[s.Cookie]
		if !ok {
			b = bucket{now, s.Bytes, full}
		}
		moved := s.Bytes - b.bytes
		b.level = min(max(b.level-full*(now-b.at).Minutes(), 0)+float64(moved), full)
		yes = yes || before == nil || moved > 0 && b.level == full
		c.buckets[s.Cookie] = bucket{now, s.Bytes, b.level}
	}
	return yes
}
