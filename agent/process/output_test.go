package process

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// take receives a chunk as a stream does, and says whether it was sent.
func (r *reader) take(sent bool) string {
	c := <-r.chunks
	text := string(c.data)
	r.taken <- sent
	return text
}

// published is closed when each text was handed over.
func (o *output) published(texts ...string) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, text := range texts {
			o.publish(chunk{stdout, []byte(text)})
		}
	}()
	return done
}

func finished(done <-chan struct{}) bool {
	synctest.Wait()
	select {
	case <-done:
		return true
	default:
		return false
	}
}

func unread(o *output) (text string) {
	for _, c := range o.unread {
		text += string(c.data)
	}
	return text
}

func TestProcessWaitsForItsSlowestStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var o output
		fast, _ := o.attach()
		slow, _ := o.attach()
		done := o.published("one", "two")
		taken := make(chan string, 2)
		go func() {
			for range 2 {
				taken <- fast.take(true)
			}
		}()
		require.False(t, finished(done))
		require.Equal(t, "one", slow.take(true))
		require.Equal(t, "one", <-taken)
		require.False(t, finished(done))
		require.Equal(t, "two", slow.take(true))
		require.Equal(t, "two", <-taken)
		require.True(t, finished(done))
		require.Empty(t, unread(&o))
	})
}

func TestStreamThatLeavesFreesTheProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var o output
		r, _ := o.attach()
		done := o.published("one", "two")
		require.False(t, finished(done))
		require.Equal(t, "one", r.take(false)) // the connection is broken
		o.detach(r)
		require.True(t, finished(done))
		_, kept := o.attach()
		require.Len(t, kept, 1)
		require.Equal(t, "onetwo", string(kept[0].data))
		require.Empty(t, unread(&o))
	})
}

// The only stream fails with a chunk while another one comes.
func TestChunkThatFailedGoesToTheNextStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var o output
		first, _ := o.attach()
		done := o.published("one")
		synctest.Wait()
		second, kept := o.attach()
		require.Empty(t, kept)
		require.Equal(t, "one", first.take(false))
		o.detach(first)
		require.Equal(t, "one", second.take(true))
		require.True(t, finished(done))
	})
}

func TestNewestOutputIsKeptWithinItsBound(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		var o output
		var all []byte
		for len(all) < 4*maxUnread {
			data := bytes.Repeat([]byte{byte(r.Uint32())}, 1+r.IntN(chunkSize>>r.IntN(15)))
			all = append(all, data...)
			o.publish(chunk{source(r.IntN(2)), data})
			size := 0
			for _, c := range o.unread {
				require.NotEmpty(t, c.data)
				size += len(c.data) + chunkCost
			}
			require.Equal(t, size, o.unreadSize)
			require.LessOrEqual(t, size, maxUnread)
		}
		kept := unread(&o)
		require.True(t, bytes.HasSuffix(all, []byte(kept)))
		require.Greater(t, len(kept)+chunkCost*len(o.unread), maxUnread-chunkSize)
	}
}
