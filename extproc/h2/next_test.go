package h2

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
)

// collector keeps all messages of its calls, up to one that is "end".
type collector struct{ messages chan string }

func (c collector) Now(message []byte, _ string) (Reply, Later) {
	c.messages <- string(message)
	if string(message) == "end" {
		return Reply{Status: codes.FailedPrecondition, Text: "enough"}, nil
	}
	return Reply{Next: true}, nil
}

func TestHandlerCanTakeAllMessagesOfACall(t *testing.T) {
	c := collector{make(chan string, 100)}
	p := connect(t, serve(t, NewServer(map[string]Handler{testMethod: c})))
	// Messages that share a frame, and messages in parts, of more than the window of a stream together.
	long := string(bytes.Repeat([]byte("x"), 100_000))
	all := bytes.Join([][]byte{message("a"), message(""), message(long), message("b"), message(long), message(long), message(long), message("c")}, nil)
	p.begin(1)
	sent := 0
	for len(all) > 0 {
		n := min(len(all), 16_000)
		p.until(func() bool { return sent+n <= maxMessage+p.of(1).credit })
		require.NoError(t, p.WriteData(1, false, all[:n]))
		all, sent = all[n:], sent+n
	}
	for _, want := range []string{"a", "", long, "b", long, long, long, "c"} {
		require.Equal(t, want, <-c.messages)
	}
	require.NoError(t, p.WriteData(1, true, nil))
	p.until(func() bool { return p.of(1).ended })
	require.Contains(t, p.of(1).header, "grpc-status 0")

	p.begin(3)
	require.NoError(t, p.WriteData(3, false, bytes.Join([][]byte{message("a"), message("end"), message("b")}, nil)))
	p.until(func() bool { return p.of(3).ended })
	require.Contains(t, p.of(3).header, "grpc-status 9")
	require.Equal(t, []string{"a", "end"}, []string{<-c.messages, <-c.messages})
	require.Empty(t, c.messages, "what follows the answer is dropped")

	p.begin(5)
	require.NoError(t, p.WriteData(5, true, message("a")))
	p.until(func() bool { return p.of(5).ended })
	require.Contains(t, p.of(5).header, "grpc-status 0")
}
