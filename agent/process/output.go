package process

import (
	"sync"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
)

const (
	// chunkSize is the most that is read from a process at once.
	chunkSize = 32 << 10
	// maxUnread bounds the output of a process that no stream has taken.
	maxUnread = 64 << 10
	// chunkCost is what a chunk in unread costs beside its data. Sources that take turns make many.
	chunkCost = 64
)

// source says where output comes from.
type source int

const (
	stdout source = iota
	stderr
	terminal
)

// chunk is output of a process.
type chunk struct {
	source source
	data   []byte
}

func (c chunk) event() *processpb.ProcessEvent {
	data := &processpb.ProcessEvent_DataEvent{}
	switch c.source {
	case stdout:
		data.Output = &processpb.ProcessEvent_DataEvent_Stdout{Stdout: c.data}
	case stderr:
		data.Output = &processpb.ProcessEvent_DataEvent_Stderr{Stderr: c.data}
	case terminal:
		data.Output = &processpb.ProcessEvent_DataEvent_Pty{Pty: c.data}
	}
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: data}}
}

// output hands what a process writes to the streams that are attached.
type output struct {
	// publishing is held while a chunk is handed over: sources take turns.
	publishing sync.Mutex

	mu      sync.Mutex
	readers map[*reader]struct{}
	// unread is what no reader has taken, the oldest first.
	unread     []chunk
	unreadSize int
}

// reader is a stream that is attached.
type reader struct {
	// chunks gets each chunk of the output. The data is the publisher's again after the answer in taken.
	chunks chan chunk
	// taken gets whether the chunk was sent, once for each chunk that was received.
	taken chan bool
	// gone is closed when the reader receives no more.
	gone chan struct{}
}

// attach returns a new reader and the chunks that it has to send before those that it receives. Detach it.
func (o *output) attach() (*reader, []chunk) {
	r := &reader{chunks: make(chan chunk), taken: make(chan bool, 1), gone: make(chan struct{})}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.readers == nil {
		o.readers = make(map[*reader]struct{})
	}
	o.readers[r] = struct{}{}
	unread := o.unread
	o.unread, o.unreadSize = nil, 0
	return r, unread
}

func (o *output) detach(r *reader) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.readers, r)
	close(r.gone)
}

// publish returns when each reader has sent the chunk or is gone. If no reader has sent it, it is kept.
func (o *output) publish(c chunk) {
	o.publishing.Lock()
	defer o.publishing.Unlock()
	for tried := map[*reader]bool{}; ; {
		readers := o.others(tried, c)
		if len(readers) == 0 || deliver(readers, c) {
			return
		}
		for _, r := range readers {
			tried[r] = true
		}
	}
}

// others returns the readers that were not tried. It keeps the chunk if there are none.
func (o *output) others(tried map[*reader]bool, c chunk) []*reader {
	o.mu.Lock()
	defer o.mu.Unlock()
	var readers []*reader
	for r := range o.readers {
		if !tried[r] {
			readers = append(readers, r)
		}
	}
	if len(readers) == 0 {
		o.keep(c)
	}
	return readers
}

// keep copies a chunk to the end of the unread ones and drops the oldest beyond maxUnread. The caller
// holds mu.
func (o *output) keep(c chunk) {
	if n := len(o.unread); n > 0 && o.unread[n-1].source == c.source && len(o.unread[n-1].data) < chunkSize {
		o.unread[n-1].data = append(o.unread[n-1].data, c.data...)
	} else {
		o.unread = append(o.unread, chunk{c.source, append([]byte(nil), c.data...)})
		o.unreadSize += chunkCost
	}
	o.unreadSize += len(c.data)
	for o.unreadSize > maxUnread {
		oldest := &o.unread[0]
		if over := o.unreadSize - maxUnread; over < len(oldest.data) {
			oldest.data = append([]byte(nil), oldest.data[over:]...)
			o.unreadSize -= over
			return
		}
		o.unreadSize -= len(oldest.data) + chunkCost
		o.unread = append([]chunk(nil), o.unread[1:]...)
	}
}

// deliver hands a chunk to each reader. It reports whether one of them has sent it.
func deliver(readers []*reader, c chunk) bool {
	received := readers[:0:0]
	for _, r := range readers {
		select {
		case r.chunks <- c:
			received = append(received, r)
		case <-r.gone:
		}
	}
	sent := false
	for _, r := range received {
		if <-r.taken {
			sent = true
		}
	}
	return sent
}
