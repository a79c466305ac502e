package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/bench/hop/table"
)

// The workloads.
const (
	workGet       = "get"       // a small GET
	workPost      = "post"      // a POST of 64 KiB
	workWebSocket = "websocket" // a message of 32 bytes and its echo, on an open WebSocket
)

const (
	postSize    = 64 << 10
	messageSize = 32
	// ioLimit bounds each exchange.
	ioLimit = 30 * time.Second
)

// target is where a load goes.
type target struct {
	addr string
	port uint16 // of the sandboxes
	// byHeader names the destination in a header, for an Envoy without a router.
	byHeader bool
}

// outcome is what a load has seen while it was measured.
type outcome struct {
	took []uint32 // nanoseconds, sorted
	bad  int      // exchanges that failed, in the warm-up too
	err  error    // the first of them
}

const (
	phaseWarm = iota
	phaseMeasured
	phaseEnd
)

// load is a closed loop over connections: each sends its next request when the last is answered.
type load struct {
	target    target
	work      string
	sandboxes int
	// rate is how many requests begin in a second, each at the sandbox that was visited least recently. 0: a
	// closed loop.
	rate    int
	next    atomic.Int64
	phase   atomic.Int32
	warm    sync.WaitGroup // the connections that have not visited each of their sandboxes
	running sync.WaitGroup

	mu  sync.Mutex
	all outcome
}

// start begins the warm-up. The connections share out the sandboxes, as the connections of clients do.
func start(t target, work string, connections, sandboxes, rate int) *load {
	l := &load{target: t, work: work, sandboxes: sandboxes, rate: rate}
	l.warm.Add(connections)
	for c := range connections {
		if rate > 0 {
			l.running.Go(func() { l.paced(c, connections) })
		} else {
			l.running.Go(func() { l.run(c, connections) })
		}
	}
	return l
}

// end ends the load and returns what it has seen.
func (l *load) end() outcome {
	l.phase.Store(phaseEnd)
	l.running.Wait()
	slices.Sort(l.all.took)
	return l.all
}

// paced is a connection of a load with a rate. What it takes counts from the time at which a request should begin.
func (l *load) paced(number, connections int) {
	w := &worker{load: l, took: make([]uint32, 0, 1<<12)}
	defer w.hangUp()
	l.warm.Done()
	pause := time.Duration(connections) * time.Second / time.Duration(l.rate)
	next := time.Now().Add(pause * time.Duration(number) / time.Duration(connections))
	for l.phase.Load() != phaseEnd {
		time.Sleep(time.Until(next))
		i := int(l.next.Add(1)) % l.sandboxes
		if err := w.exchange(i); err != nil {
			w.fail(fmt.Errorf("%s to %s: %w", l.work, table.Host(i, l.target.port), err))
		} else if l.phase.Load() == phaseMeasured {
			w.took = append(w.took, uint32(min(time.Since(next), math.MaxUint32)))
		}
		next = next.Add(pause)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.took = append(l.all.took, w.took...)
}

func (l *load) run(number, connections int) {
	var mine []int
	for i := number % l.sandboxes; i < l.sandboxes; i += connections {
		mine = append(mine, i)
	}
	w := &worker{load: l, random: rand.New(rand.NewPCG(uint64(number), 1)), took: make([]uint32, 0, 1<<15)}
	defer w.hangUp()
	visited := false
	for n := 0; l.phase.Load() != phaseEnd; n++ {
		if !visited && n == len(mine) {
			visited = true
			l.warm.Done()
		}
		i := mine[n%len(mine)]
		if visited {
			i = mine[w.random.IntN(len(mine))]
		}
		began := time.Now()
		if err := w.exchange(i); err != nil {
			w.fail(fmt.Errorf("%s to %s: %w", l.work, table.Host(i, l.target.port), err))
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if l.phase.Load() == phaseMeasured {
			w.took = append(w.took, uint32(min(time.Since(began), math.MaxUint32)))
		}
	}
	if !visited {
		l.warm.Done()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.took = append(l.all.took, w.took...)
}

// worker is one connection of a client.
type worker struct {
	load     *load
	conn     net.Conn
	random   *rand.Rand
	took     []uint32
	requests [][]byte // by sandbox, made when they are first needed
	buf      [16 << 10]byte
}

func (w *worker) hangUp() {
	if w.conn != nil {
		_ = w.conn.Close()
		w.conn = nil
	}
}

func (w *worker) fail(err error) {
	w.hangUp()
	w.load.mu.Lock()
	defer w.load.mu.Unlock()
	w.load.all.bad++
	if w.load.all.err == nil {
		w.load.all.err = err
	}
}

// exchange sends one request and reads the answer. A WebSocket stays with the sandbox of its first message.
func (w *worker) exchange(i int) error {
	fresh := w.conn == nil
	if fresh {
		var err error
		if w.conn, err = net.DialTimeout("tcp", w.load.target.addr, ioLimit); err != nil {
			w.conn = nil
			return err
		}
		// One deadline for the whole life, because a deadline for each request costs a timer. It is longer than a
		// turn.
		_ = w.conn.SetDeadline(time.Now().Add(2 * time.Minute))
	}
	if w.load.work == workWebSocket && !fresh {
		return w.message()
	}
	if _, err := w.conn.Write(w.request(i)); err != nil {
		return err
	}
	if w.load.work == workPost {
		if _, err := w.conn.Write(zeros[:postSize]); err != nil {
			return err
		}
	}
	return w.answer()
}

var zeros [postSize]byte

func (w *worker) request(i int) []byte {
	if w.load.rate > 0 {
		return w.load.request(i) // most sandboxes are visited once
	}
	if w.requests == nil {
		w.requests = make([][]byte, w.load.sandboxes)
	}
	if w.requests[i] == nil {
		w.requests[i] = w.load.request(i)
	}
	return w.requests[i]
}

// request is the head of a request to a sandbox, with the headers of an ordinary client.
func (l *load) request(i int) []byte {
	var b bytes.Buffer
	method, path := "GET", "/healthz"
	if l.work == workPost {
		method, path = "POST", "/upload"
	}
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: hop/1.0 (benchmark)\r\nAccept: */*\r\n"+
		"Accept-Encoding: identity\r\nAccept-Language: en\r\n"+
		"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
		method, path, table.Host(i, l.target.port))
	if l.target.byHeader {
		fmt.Fprintf(&b, "X-Envoy-Original-Dst-Host: %s\r\n", table.Dst(i, l.target.port))
	}
	switch l.work {
	case workPost:
		fmt.Fprintf(&b, "Content-Type: application/octet-stream\r\nContent-Length: %d\r\n", postSize)
	case workWebSocket:
		b.WriteString("Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" +
			"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// message sends a frame and reads its echo.
func (w *worker) message() error {
	frame := append(w.buf[:0], 0x82, 0x80|messageSize, 0, 0, 0, 0)
	frame = append(frame, zeros[:messageSize]...)
	if _, err := w.conn.Write(frame); err != nil {
		return err
	}
	echo := w.buf[:2+messageSize]
	if _, err := io.ReadFull(w.conn, echo); err != nil {
		return err
	}
	if echo[0] != 0x82 || echo[1] != messageSize {
		return fmt.Errorf("the echo begins with %x", echo[:2])
	}
	return nil
}

// answer reads an answer, whose body has a length or is empty.
func (w *worker) answer() error {
	have := 0
	for {
		n, err := w.conn.Read(w.buf[have:])
		if err != nil {
			return err
		}
		have += n
		end := bytes.Index(w.buf[:have], []byte("\r\n\r\n"))
		if end < 0 {
			if have == len(w.buf) {
				return errors.New("an answer with too long a header")
			}
			continue
		}
		status, length, err := head(w.buf[:end+2])
		want := 200
		if w.load.work == workWebSocket {
			want = 101
		}
		switch {
		case err != nil:
			return err
		case status != want:
			return fmt.Errorf("status %d: %s", status, w.buf[:have])
		case have > end+4+length:
			return errors.New("more bytes than the answer's length")
		}
		_, err = io.ReadFull(w.conn, w.buf[have:end+4+length])
		return err
	}
}

// head returns status and content length of an answer.
func head(b []byte) (status, length int, err error) {
	line, rest, _ := bytes.Cut(b, []byte("\r\n"))
	if len(line) < len("HTTP/1.1 200") {
		return 0, 0, fmt.Errorf("a status line %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, 0, err
	}
	for len(rest) > 0 {
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		const name = "content-length:"
		if len(line) > len(name) && bytes.EqualFold(line[:len(name)], []byte(name)) {
			length, err = strconv.Atoi(string(bytes.TrimSpace(line[len(name):])))
			return status, length, err
		}
	}
	return status, 0, nil
}
