package h2

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// play does what a plan says, byte by byte, as a peer that keeps to the rules, and returns what was seen of
// each stream in the end, but of those that the peer has reset.
func play(t testing.TB, socket string, plan []byte) (seen []string) {
	p := connect(t, socket)
	defer p.conn.Close()
	require.NoError(t, p.conn.SetWriteDeadline(time.Now().Add(soon)))
	type state struct {
		text     string // what it asks, empty: nothing yet
		rest     []byte // of the message, to be sent
		reset    bool
		complete bool
	}
	var streams []*state
	id := func(n int) uint32 { return uint32(2*n + 1) }
	texts := []string{"hello", "fail", "more", "keep", "later", "keep later", "", strings.Repeat("long ", 1000)}
	for len(plan) >= 2 {
		op, arg := plan[0]%8, int(plan[1])
		plan = plan[2:]
		if op == 0 && len(streams) < 12 {
			p.begin(id(len(streams)))
			streams = append(streams, &state{})
			continue
		}
		if len(streams) == 0 {
			continue
		}
		n := arg % len(streams)
		s := streams[n]
		switch op {
		case 1, 2: // a question, or the next part of one
			if s.reset || s.complete {
				continue
			}
			if s.rest == nil {
				s.text = texts[arg/12%len(texts)]
				s.rest = message(s.text)
			}
			part := s.rest[:min(len(s.rest), 1+arg*60, minFrame)]
			require.NoError(t, p.WriteDataPadded(id(n), false, part, make([]byte, arg%3)))
			s.rest = s.rest[len(part):]
			s.complete = len(s.rest) == 0
		case 3:
			if !s.reset {
				s.reset = true
				require.NoError(t, p.WriteRSTStream(id(n), http2.ErrCodeCancel))
			}
		case 4:
			require.NoError(t, p.WriteWindowUpdate(0, uint32(arg+1)))
		case 5:
			require.NoError(t, p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(arg)}))
		case 6:
			require.NoError(t, p.WritePing(false, [8]byte{byte(arg)}))
		case 7:
			require.NoError(t, p.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: uint32(minFrame + arg)},
				http2.Setting{ID: http2.SettingHeaderTableSize, Val: uint32(arg)}))
		}
	}
	require.NoError(t, p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20}))
	require.NoError(t, p.WriteWindowUpdate(0, 1<<24))
	for n, s := range streams {
		if s.reset || !s.complete {
			continue
		}
		got := p.of(id(n))
		p.until(func() bool {
			return got.over() || strings.Contains(s.text, "keep") && len(got.messages()) == 1 && !strings.HasPrefix(got.messages()[0], "a part")
		})
		seen = append(seen, fmt.Sprintf("%d: %s", n, got))
	}
	return seen
}

// FuzzBothServers compares what a peer sees of the server of this package and of grpc-go.
func FuzzBothServers(f *testing.F) {
	for _, seed := range []string{
		"\x00\x00\x01\x00", "\x00\x00\x05\x02\x01\x00\x04\x09", "\x00\x00\x00\x00\x01\x0c\x01\x25\x03\x00",
		"\x00\x00\x01\x3c\x00\x00\x01\x31\x05\x00\x07\x07", "\x00\x00\x01\x60\x01\xff\x01\xff\x06\x01\x01\xff",
	} {
		f.Add([]byte(seed))
	}
	var sockets []string
	services := []*service{newService(), newService()}
	for i, of := range []func(*service) server{(*service).own, (*service).reference} {
		close(services[i].let)
		sockets = append(sockets, serve(f, of(services[i])))
	}
	f.Fuzz(func(t *testing.T, plan []byte) {
		if len(plan) > 400 {
			return
		}
		require.Equal(t, play(t, sockets[1], plan), play(t, sockets[0], plan))
		for _, s := range services {
			for range len(s.blocked) {
				<-s.blocked
			}
			s.awaitOpen(t, 0)
		}
	})
}
