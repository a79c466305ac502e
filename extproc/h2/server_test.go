package h2

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// A peer that has left before it could know of the answer gets none. So there is nothing that it could read
// after the call was counted as ended.
// Invariant: I2
func TestEarlyHalfCloseGetsNoAnswerThatStaysOpen(t *testing.T) {
	for _, text := range []string{"keep", "keep later"} {
		s := newService()
		p := connect(t, serve(t, s.own()))
		p.begin(1)
		require.NoError(t, p.WriteData(1, true, message(text)))
		if text == "keep later" {
			<-s.blocked
			close(s.let)
		}
		p.until(func() bool { return p.of(1).over() })
		require.Empty(t, p.of(1).messages())
		require.Contains(t, p.of(1).header, "grpc-status 1")
		s.awaitOpen(t, 0)
	}
}

// A half-close may cross the answer on the socket, so it is no sign that the answer was read, whenever it
// arrives. What the peer sends after it is: RST_STREAM.
// Invariant: I2
func TestHalfCloseNeverShowsThatAnAnswerWasRead(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket)
		var out bytes.Buffer
		all := http2.NewFramer(&out, nil)
		require.NoError(t, all.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.request(), EndHeaders: true}))
		require.NoError(t, all.WriteData(1, false, message("keep")))
		require.NoError(t, all.WriteData(1, true, nil))
		_, err := p.conn.Write(out.Bytes()) // read with one read
		require.NoError(t, err)
		p.until(func() bool { return len(p.of(1).messages()) == 1 })
		p.call(3, "keep")
		p.until(func() bool { return len(p.of(3).messages()) == 1 })
		require.NoError(t, p.WriteData(3, true, nil))
		p.sync()
		s.remainOpen(t, 2)
		require.False(t, p.of(1).over() || p.of(3).over())
		require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeInternal))
		s.awaitOpen(t, 1)
		require.NoError(t, p.WriteRSTStream(3, http2.ErrCodeInternal))
		s.awaitOpen(t, 0)
	})
}

// At most a part of the answer was sent when the peer half-closed.
func TestHalfClosedCallStillGetsItsWholeAnswer(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 2})
		p.call(1, "keep")
		p.until(func() bool { return len(p.of(1).data) == 2 })
		require.NoError(t, p.WriteData(1, true, nil))
		require.NoError(t, p.WriteWindowUpdate(1, 100))
		p.until(func() bool { m := p.of(1).messages(); return len(m) == 1 && m[0] == "keep" })
		p.sync()
		s.remainOpen(t, 1)
		require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeInternal))
		s.awaitOpen(t, 0)
	})
}

// The framer does not tell these from the end of the socket.
func TestFramesThatAreTooShortEndTheConnectionInOrder(t *testing.T) {
	for name, c := range map[string]struct {
		kind    http2.FrameType
		flags   http2.Flags
		payload []byte
	}{
		"padded DATA":             {http2.FrameData, http2.FlagDataPadded, nil},
		"padded HEADERS":          {http2.FrameHeaders, http2.FlagHeadersPadded, nil},
		"HEADERS with a priority": {http2.FrameHeaders, http2.FlagHeadersPriority, []byte{1, 2}},
		"PUSH_PROMISE":            {http2.FramePushPromise, 0, []byte{1, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService()
			p := connect(t, serve(t, s.own()))
			p.call(1, "keep")
			p.until(func() bool { return len(p.of(1).messages()) == 1 })
			require.NoError(t, p.WriteRawFrame(c.kind, c.flags, 1, c.payload))
			p.untilClosed()
			require.Equal(t, []string{"FRAME_SIZE_ERROR after 1"}, p.goAways)
			s.awaitOpen(t, 1)
			p.conn.Close()
			s.awaitOpen(t, 0)
		})
	}
}

// full is a listener that once has no file for a connection.
type full struct {
	net.Listener
	failed bool
}

func (l *full) Accept() (net.Conn, error) {
	if !l.failed {
		l.failed = true
		return nil, &net.OpError{Op: "accept", Net: "unix", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

func TestServerGoesOnWhenFilesRunOut(t *testing.T) {
	server := newService().own()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(&full{Listener: l}) }()
	p := connect(t, l.Addr().String())
	p.call(1, "hello")
	p.until(func() bool { return p.of(1).over() })
	server.Stop()
	require.NoError(t, <-served)
}

// A client that gets no answer may ask another server. One that is refused may not.
func TestStopAnswersNoCallThatWaits(t *testing.T) {
	overServers(t, func(t *testing.T, s *service, server server, socket string) {
		var peers []*peer
		for range 20 {
			p := connect(t, socket)
			p.call(1, "later")
			<-s.blocked
			peers = append(peers, p)
		}
		server.Stop()
		for _, p := range peers {
			p.untilClosed()
			require.Empty(t, p.of(1).messages())
			require.Empty(t, p.of(1).header)
		}
	})
}

func TestStopMayOvertakeAGracefulStop(t *testing.T) {
	for range 20 {
		s := newService()
		server := s.own()
		p := connect(t, serve(t, server))
		p.call(1, "keep")
		p.until(func() bool { return len(p.of(1).messages()) == 1 })
		stopped := make(chan struct{})
		go func() { defer close(stopped); server.GracefulStop() }()
		server.Stop()
		<-stopped
		_, _, byServer := s.open()
		require.Equal(t, 1, byServer)
	}
}

// dumb is a connection that takes no output any more.
type dumb struct{ *net.UnixConn }

func (dumb) Write([]byte) (int, error) { return 0, syscall.ENOBUFS }

func TestConnectionThatTakesNoOutputEnds(t *testing.T) {
	s := newService()
	server := NewServer(map[string]Handler{testMethod: s})
	t.Cleanup(server.Stop)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	require.NoError(t, err)
	defer l.Close()
	p := connectRaw(t, l.Addr().String())
	accepted, err := l.AcceptUnix()
	require.NoError(t, err)
	server.start(dumb{accepted})
	p.untilClosed()
}

func TestMessagesThatAreNotCompleteAreBounded(t *testing.T) {
	p := connect(t, serve(t, newService().own()))
	part := message(strings.Repeat("x", maxMessage-prefixLength))[:minFrame]
	for id := uint32(1); len(p.goAways) == 0; id += 2 {
		require.Less(t, int(id), 4*maxPartial/minFrame)
		p.begin(id)
		_ = p.WriteData(id, false, part)
		if id%64 == 1 {
			_ = p.WritePing(false, [8]byte{})
			require.NoError(t, p.conn.SetReadDeadline(time.Now().Add(soon)))
			for before := p.pings; p.pings == before && len(p.goAways) == 0; {
				require.NoError(t, p.read())
			}
		}
	}
	require.Contains(t, p.goAways[0], "ENHANCE_YOUR_CALM")
}

// Otherwise a connection that has carried 16 MiB would end, whatever the peer does.
// Invariant: P8
func TestFinishedMessagesDoNotCountAsIncomplete(t *testing.T) {
	for name, finish := range map[string]func(p *peer, id uint32, rest []byte){
		"complete": func(p *peer, id uint32, rest []byte) { _ = p.WriteData(id, false, rest) },
		"reset":    func(p *peer, id uint32, _ []byte) { _ = p.WriteRSTStream(id, http2.ErrCodeCancel) },
		"too long": func(p *peer, id uint32, _ []byte) {
			p.begin(id + 2)
			prefix := binary.BigEndian.AppendUint32([]byte{0}, maxMessage)
			_ = p.WriteData(id+2, false, prefix[:4])
			_ = p.WriteData(id+2, false, prefix[4:])
			_ = p.WriteRSTStream(id, http2.ErrCodeCancel)
		},
		"half-closed": func(p *peer, id uint32, _ []byte) { _ = p.WriteData(id, true, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			p := connect(t, serve(t, newService().own()))
			m := message("fail " + strings.Repeat("x", minFrame))
			id := uint32(1)
			for sent := 0; sent < maxPartial+maxPartial/8; sent += minFrame {
				p.begin(id)
				require.NoError(t, p.WriteData(id, false, m[:minFrame]))
				finish(p, id, m[minFrame:])
				if id += 4; id%256 == 1 {
					p.sync()
				}
			}
			p.call(id, "hello")
			p.until(func() bool { return p.of(id).over() })
			require.Empty(t, p.goAways)
		})
	}
}

// The server grants what it has received, padding included, and no more.
// Invariant: P8
func TestServerGrantsWhatItHasReceived(t *testing.T) {
	p := connect(t, serve(t, newService().own()))
	p.sync()
	granted := p.credit // at the begin
	require.Equal(t, connWindow-firstWindow, granted)
	sent, id := 0, uint32(1)
	for ; sent < 4*connWindow; id += 2 {
		p.begin(id)
		for range 16 { // without an answer in between
			require.NoError(t, p.WriteDataPadded(id, false, make([]byte, 1), make([]byte, 255)))
			sent += 1 + 1 + 255 // the length of the padding is a byte
		}
		require.NoError(t, p.WriteRSTStream(id, http2.ErrCodeCancel))
		if id%64 == 1 {
			p.sync()
			require.LessOrEqual(t, p.credit-granted, sent)
			require.Greater(t, p.credit-granted, sent-connWindow, "the peer cannot send any more")
		}
	}
}

// Invariant: P8
func TestStreamTakesNoMoreThanItsWindow(t *testing.T) {
	for name, padding := range map[string][]byte{"data": nil, "padding": make([]byte, 255)} {
		t.Run(name, func(t *testing.T) {
			s := newService()
			p := connect(t, serve(t, s.own()))
			p.call(1, "keep")
			sent := len(message("keep"))
			further := make([]byte, 10_000) // is dropped
			frame := len(further)
			if padding != nil {
				further, frame = nil, 1+len(padding)
			}
			for ; sent+frame <= maxMessage; sent += frame {
				require.NoError(t, p.WriteDataPadded(1, false, further, padding))
			}
			p.sync()
			require.Empty(t, p.goAways)
			require.NoError(t, p.WriteDataPadded(1, false, further, padding))
			before := p.pings
			require.NoError(t, p.WritePing(false, [8]byte{}))
			p.until(func() bool { return len(p.goAways) > 0 || p.pings > before })
			require.Equal(t, []string{"FLOW_CONTROL_ERROR after 1"}, p.goAways)
		})
	}
}

func TestUnaskedAnswerToThePingOfDrainingIsIgnored(t *testing.T) {
	p := connect(t, serve(t, newService().own()))
	require.NoError(t, p.WritePing(true, drainPing))
	p.call(1, "hello")
	p.until(func() bool { return p.of(1).over() })
	require.Empty(t, p.goAways)
}

// One call that waits delays no other one of its connection.
func TestWaitingCallDelaysNoOther(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket)
		p.call(1, "later")
		<-s.blocked
		p.call(3, "hello")
		p.until(func() bool { return p.of(3).over() })
		require.Empty(t, p.of(1).messages())
		close(s.let)
		p.until(func() bool { return p.of(1).over() })
		require.Equal(t, []string{"later"}, p.of(1).messages())
	})
}

// A call that the peer resets while its answer is made ends at once, and its answer is not sent.
func TestResetEndsACallThatWaits(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket)
		p.call(1, "keep later")
		<-s.blocked
		require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeCancel))
		require.Eventually(t, func() bool { _, byPeer, _ := s.open(); return byPeer == 1 }, soon, time.Millisecond)
		p.sync()
		require.Empty(t, p.of(1).messages())
	})
}

// The goroutine of a call that was reset may still run when the peer has opened the next ones.
// Invariant: I1
func TestAnswerOfAResetCallReachesNoOther(t *testing.T) {
	s := newService()
	s.deaf = true
	p := connect(t, serve(t, s.own()))
	const calls = 40
	for id := uint32(1); id < 2*calls; id += 2 {
		p.call(id, fmt.Sprintf("later %d", id))
		<-s.blocked
	}
	for id := uint32(1); id < 2*calls; id += 2 {
		require.NoError(t, p.WriteRSTStream(id, http2.ErrCodeCancel))
	}
	for id := uint32(2*calls + 1); id < 4*calls; id += 2 {
		p.call(id, fmt.Sprintf("later %d", id))
		<-s.blocked
	}
	close(s.let)
	for id := uint32(2*calls + 1); id < 4*calls; id += 2 {
		p.until(func() bool { return p.of(id).over() })
		require.Equal(t, []string{fmt.Sprintf("later %d", id)}, p.of(id).messages())
	}
}

func TestConnectionHoldsABoundedNumberOfStreams(t *testing.T) {
	s := newService()
	p := connect(t, serve(t, s.own()))
	id := uint32(1)
	block := p.request()
	for ; id < 2*maxStreams; id += 2 {
		p.headers(id, block, false)
		if id == 1 {
			block = p.request() // by the table
		}
	}
	p.call(id, "hello")
	p.until(func() bool { return p.of(id).over() })
	require.Equal(t, "reset "+http2.ErrCodeRefusedStream.String(), p.of(id).String())
	require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeCancel))
	p.call(id+2, "hello")
	p.until(func() bool { return p.of(id + 2).over() })
	require.Equal(t, []string{"hello"}, p.of(id+2).messages())
}

// A peer that resets each call at once gets no more goroutines than it may have streams.
func TestResetStreamsCountWhileTheirGoroutinesRun(t *testing.T) {
	s := newService()
	s.deaf = true
	defer func() { close(s.let) }()
	p := connect(t, serve(t, s.own()))
	refused := uint32(0)
	for id := uint32(1); id < 2*maxStreams+200; id += 2 {
		p.call(id, "later")
		require.NoError(t, p.WriteRSTStream(id, http2.ErrCodeCancel))
		if id%1000 == 1 {
			p.sync()
		}
	}
	p.sync()
	for _, s := range p.streams {
		if s.wasReset && s.reset == http2.ErrCodeRefusedStream {
			refused++
		}
	}
	require.EqualValues(t, 100, refused)
	require.LessOrEqual(t, runtime.NumGoroutine(), maxStreams+100)
}

// A peer that does not read its answers is not read either, so it cannot make the server remember them.
func TestPeerThatDoesNotReadIsNotRead(t *testing.T) {
	s := newService()
	server := s.own()
	p := connect(t, serve(t, server))
	ping := []byte("\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678")
	flood := []byte(strings.Repeat(string(ping), 1000))
	require.NoError(t, p.conn.SetWriteDeadline(time.Now().Add(time.Second)))
	sent, err := 0, error(nil)
	for err == nil {
		var n int
		n, err = p.conn.Write(flood)
		sent += n
		require.Less(t, sent, 100<<20, "the server takes everything")
	}
	require.ErrorContains(t, err, "timeout")
	server.Stop() // does not wait for the peer
}

func TestGracefulStopServesWhatIsOnItsWay(t *testing.T) {
	overServers(t, func(t *testing.T, s *service, server server, socket string) {
		p, idle := connect(t, socket), connect(t, socket)
		if strings.HasSuffix(t.Name(), "own") { // grpc-go waits for its preface
			silent := connectRaw(t, socket)
			defer silent.untilClosed()
		}
		p.call(1, "keep")
		p.call(3, "later")
		<-s.blocked
		p.until(func() bool { return len(p.of(1).messages()) == 1 })
		stopped := make(chan struct{})
		go func() { defer close(stopped); server.GracefulStop() }()
		// The first GOAWAY and a ping are here, but the peer has opened a stream before it read them.
		for len(p.goAways) == 0 {
			f, err := p.ReadFrame()
			require.NoError(t, err)
			if g, ok := f.(*http2.GoAwayFrame); ok {
				require.EqualValues(t, maxWindow, g.LastStreamID)
				p.goAways = append(p.goAways, "first")
			}
		}
		p.call(5, "hello")
		p.until(func() bool { return len(p.goAways) == 2 && p.of(5).over() })
		require.Equal(t, "NO_ERROR after 5", p.goAways[1])
		require.Equal(t, []string{"hello"}, p.of(5).messages())
		p.call(7, "too late")
		close(s.let)
		p.until(func() bool { return p.of(3).over() })
		require.Empty(t, p.of(7).messages())
		idle.untilClosed()
		select {
		case <-stopped:
			t.Fatal("a call is open")
		default:
		}
		require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeNo))
		p.untilClosed()
		<-stopped
		open, byPeer, byServer := s.open()
		require.Equal(t, [3]int{0, 1, 0}, [3]int{open, byPeer, byServer})
		_, err := net.Dial("unix", socket)
		require.Error(t, err)
	})
}

func TestStopEndsCallsWithoutTheirPeers(t *testing.T) {
	s := newService()
	server := s.own()
	p := connect(t, serve(t, server))
	p.call(1, "keep")
	p.call(3, "keep later")
	<-s.blocked
	p.until(func() bool { return len(p.of(1).messages()) == 1 })
	server.Stop()
	p.untilClosed()
	open, byPeer, byServer := s.open()
	require.Equal(t, [3]int{0, 0, 2}, [3]int{open, byPeer, byServer})
	server.Stop()
	server.GracefulStop()
}

// Invariant: I2
func TestEndOfConnectionEndsEveryCallOnce(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket)
		kept := 0
		for id := uint32(1); id < 200; id += 2 {
			text := []string{"keep", "keep later", "later"}[id%3]
			p.call(id, text)
			if text == "keep" {
				p.until(func() bool { return len(p.of(id).messages()) == 1 })
			} else {
				<-s.blocked
			}
			if text != "later" {
				kept++
			}
		}
		p.conn.Close()
		require.Eventually(t, func() bool { _, byPeer, byServer := s.open(); return byPeer == kept && byServer == 0 }, soon, time.Millisecond)
	})
}

// Many connections do everything at once: every call that stays open is ended once, and none is mixed up.
func TestCallsOfManyConnectionsAreNotMixedUp(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		close(s.let)
		done := make(chan error, 8)
		for n := range cap(done) {
			random := rand.New(rand.NewPCG(uint64(n), 1))
			p := connect(t, socket)
			go func() {
				done <- func() error {
					texts := map[uint32]string{}
					for id := uint32(1); id < 600; id += 2 {
						texts[id] = strings.Join([]string{[]string{"", "keep ", "later ", "keep later ", "more "}[random.IntN(5)], strings.Repeat("x", random.IntN(50))}, "")
						p.call(id, texts[id])
						for len(p.of(id).messages()) < 1 || strings.Contains(texts[id], "more") && len(p.of(id).messages()) < 2 {
							if err := p.read(); err != nil {
								return err
							}
						}
						all := p.of(id).messages()
						require.Equal(t, texts[id], all[len(all)-1])
						if strings.Contains(texts[id], "keep") && random.IntN(3) > 0 {
							if err := p.WriteRSTStream(id, http2.ErrCodeNo); err != nil {
								return err
							}
						}
					}
					return p.conn.Close()
				}()
			}()
		}
		for range cap(done) {
			require.NoError(t, <-done)
		}
		s.awaitOpen(t, 0)
	})
}

// FuzzConnection sends anything to the server. It must end no call twice, and must stop.
func FuzzConnection(f *testing.F) {
	for _, seed := range []string{
		"",
		"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
		"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x82",
		"\x00\x00\x06\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x01k",
		"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08",
		"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x08",
		"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x01",
	} {
		f.Add([]byte(seed), uint8(1))
	}
	s := newService()
	close(s.let)
	server := NewServer(map[string]Handler{testMethod: s})
	defer server.Stop()
	f.Fuzz(func(t *testing.T, frames []byte, open uint8) {
		ours, theirs := net.Pipe()
		server.start(ours)
		read := make(chan struct{})
		go func() { defer close(read); _, _ = io.Copy(io.Discard, theirs) }()
		p := &peer{Framer: http2.NewFramer(theirs, nil), t: t}
		p.encoder = newEncoder(&p.block)
		_, _ = io.WriteString(theirs, http2.ClientPreface)
		_ = p.WriteSettings()
		for n := range uint32(open % 8) { // some calls are open when the frames come
			_ = p.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*n + 1, BlockFragment: p.request(), EndHeaders: true})
			_ = p.WriteData(2*n+1, false, message([]string{"keep", "keep later", "big", "more keep"}[n%4]))
		}
		_, _ = theirs.Write(frames)
		theirs.Close()
		<-read
		s.awaitOpen(t, 0)
	})
}
