package wire

import (
	"sync/atomic"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// Answer is one ProcessingResponse, encoded. It never changes.
type Answer struct {
	// message is shared by all streams that send the Answer. Its buffer is one that gRPC does not free.
	message mem.BufferSlice
}

// NewAnswer encodes m. Text that is no UTF-8 is an error.
func NewAnswer(m *extprocv3.ProcessingResponse) (*Answer, error) {
	b, err := proto.Marshal(m)
	return &Answer{mem.BufferSlice{mem.SliceBuffer(b)}}, err
}

// Bytes returns the encoded message. The caller must not change it.
func (a *Answer) Bytes() []byte { return a.message[0].ReadOnlyData() }

// maxAnswers bounds the ports of one sandbox for which answers are kept.
const maxAnswers = 8

// Answers are the Answers of one route by port. The zero value has none. All methods may be called
// concurrently.
type Answers struct {
	newest atomic.Pointer[portAnswer]
}

// portAnswer is an element of a list. It never changes.
type portAnswer struct {
	answer *Answer
	port   uint16
	count  uint16 // of the elements of the list
	older  *portAnswer
}

// Get returns the Answer that was added for a port, or nil.
func (a *Answers) Get(port uint16) *Answer {
	for p := a.newest.Load(); p != nil; p = p.older {
		if p.port == port {
			return p.answer
		}
	}
	return nil
}

// Add keeps an Answer for a port. It has no effect if 8 are kept, or if another call adds one at the
// same moment.
func (a *Answers) Add(port uint16, answer *Answer) {
	newest, count := a.newest.Load(), uint16(0)
	if newest != nil {
		count = newest.count
	}
	for p := newest; p != nil; p = p.older {
		if p.port == port {
			return // concurrent first requests for a port take one place
		}
	}
	if count < maxAnswers {
		a.newest.CompareAndSwap(newest, &portAnswer{answer, port, count + 1, newest})
	}
}
