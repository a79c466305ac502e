package eventlog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Bounds of a segment. The events of one write may exceed maxRaw by those of one state. Data that does not compress grows by a third as
// base64, and etcd accepts requests of up to 1.5 MiB.
const (
	maxEvents = 1000
	maxRaw    = 256 << 10 // bytes before compression
	// maxDecoded bounds what a segment may decompress to.
	maxDecoded = 4 << 20
	format     = 1
)

// segment is one EventSegment. It does not change, but for version.
type segment struct {
	first   uint64
	n       int
	term    uint64
	through fact.Revision
	// data is compressed. raw is its size before.
	data []byte
	raw  int
	// oldest and newest are the times of the first event and of the latest one.
	oldest, newest time.Time
	version        string // "": there is no object
	events         []entry
	decoded        []Event // those after events, until it is entered into the log
}

// entry is an event in memory, for selection.
type entry struct {
	of   *known
	kind uint8
}

var kinds = []Type{Created, Updated, Killed, Paused, Resumed, Checkpointed}

// kindOf returns a number for a type; one of a later version counts as none that can be asked for.
func kindOf(t Type) uint8 {
	if i := slices.Index(kinds, t); i >= 0 {
		return uint8(i)
	}
	return uint8(len(kinds))
}

// nameOf is the name of the segment with a first event.
func nameOf(first uint64) string { return fmt.Sprintf("berth-%018d", first) }

func (s *segment) name() string { return nameOf(s.first) }

func (s *segment) full() bool { return s.n >= maxEvents || s.raw >= maxRaw }

// next is the number of the event after the segment.
func (s *segment) next() uint64 { return s.first + uint64(s.n) }

// codec encodes and decodes segments. It may be used concurrently.
type codec struct {
	encoder *zstd.Encoder
	decoder *zstd.Decoder
}

func newCodec() (*codec, error) {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(2*maxRaw), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("eventlog: %w", err)
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(2), zstd.WithDecoderMaxMemory(maxDecoded))
	if err != nil {
		return nil, fmt.Errorf("eventlog: %w", err)
	}
	return &codec{encoder, decoder}, nil
}

// lines returns the text of events.
func lines(events []Event) ([]byte, error) {
	var raw []byte
	for i := range events {
		line, err := json.Marshal(&events[i])
		if err != nil {
			return nil, fmt.Errorf("encode event: %w", err)
		}
		raw = append(append(raw, line...), '\n')
	}
	return raw, nil
}

// text returns the decompressed data of a segment.
func (c *codec) text(data []byte) ([]byte, error) { return c.decoder.DecodeAll(data, nil) }

// decode returns the events of a segment, whose first one has this number.
func (c *codec) decode(data []byte, first uint64) (events []Event, raw int, err error) {
	text, err := c.text(data)
	if err != nil {
		return nil, 0, fmt.Errorf("decompress: %w", err)
	}
	for line := range bytes.Lines(text) {
		e, err := decodeLine(line, first+uint64(len(events)))
		if err != nil {
			return nil, 0, err
		}
		events = append(events, e)
	}
	return events, len(text), nil
}

// decodeSome returns the events of a segment at these indices, in their order. It costs little more than those events.
func (c *codec) decodeSome(data []byte, first uint64, at []int) (events []Event, err error) {
	text, err := c.text(data)
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	lines := slices.Collect(bytes.Lines(text))
	for _, i := range at {
		e, err := decodeLine(lines[i], first+uint64(i))
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return events, nil
}

func decodeLine(line []byte, number uint64) (Event, error) {
	e := Event{Number: number}
	if err := json.Unmarshal(line, &e); err != nil {
		return e, fmt.Errorf("event %d: %w", number, err)
	}
	return e, nil
}

func (s *segment) toObject() *v1alpha1.EventSegment {
	return &v1alpha1.EventSegment{
		ObjectMeta: metav1.ObjectMeta{Name: s.name(), ResourceVersion: s.version},
		Spec: v1alpha1.EventSegmentSpec{
			Format: format, First: int64(s.first), Events: int32(s.n), Term: int64(s.term),
			Through: fmt.Sprintf("%d.%d", s.through.Term, s.through.Counter), Data: s.data,
		},
	}
}

// fromObject reads a segment. With an error it returns one that has numbers and no events.
func (c *codec) fromObject(o *v1alpha1.EventSegment) (*segment, error) {
	s := &segment{
		first: uint64(max(1, o.Spec.First)), n: int(max(0, o.Spec.Events)), term: uint64(max(0, o.Spec.Term)),
		version: o.ResourceVersion, raw: maxRaw, // nothing is added to one that cannot be read
	}
	term, counter, _ := strings.Cut(o.Spec.Through, ".")
	var err1, err2 error
	s.through.Term, err1 = strconv.ParseUint(term, 10, 64)
	s.through.Counter, err2 = strconv.ParseUint(counter, 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		s.through = fact.Revision{} // everything is compared
		return s, fmt.Errorf("spec.through: %w", err)
	}
	switch {
	case o.Name != s.name():
		return s, fmt.Errorf("the name must be %s for spec.first %d", s.name(), o.Spec.First)
	case o.Spec.Format != format:
		return s, fmt.Errorf("spec.format %d: this version reads %d", o.Spec.Format, format)
	}
	events, raw, err := c.decode(o.Spec.Data, s.first)
	switch {
	case err != nil:
		return s, err
	case len(events) != s.n || s.n == 0:
		return s, fmt.Errorf("spec.events is %d, and data has %d", s.n, len(events))
	}
	s.raw, s.data, s.decoded = raw, o.Spec.Data, events
	s.date(events)
	return s, nil
}

// date notes the times of the events.
func (s *segment) date(events []Event) {
	s.oldest = events[0].Time()
	for i := range events {
		if at := events[i].Time(); at.After(s.newest) {
			s.newest = at
		}
	}
}
