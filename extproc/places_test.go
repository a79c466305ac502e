package extproc

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/routecache"
)

// fill takes all places that are free, one for each of as many sandboxes.
func (p *places) fill() {
	for i := 0; p.take(sandboxid.MustKey(fmt.Sprintf("filler%d", i))); i++ {
	}
}

// takeAll takes all places that a sandbox gets.
func (p *places) takeAll(id string) (n int) {
	for p.take(key(id)) {
		n++
	}
	return n
}

func TestEachSandboxHasAShareOfPlaces(t *testing.T) {
	var p places
	require.Equal(t, maxHeld/2, p.takeAll("abc"))
	require.Equal(t, maxHeld/4, p.takeAll("def"))
	require.Zero(t, p.takeAll("abc"), "it has more than are left")
	p.giveBack(key("abc"))
	require.Zero(t, p.takeAll("abc"))
	for range maxHeld/2 - 1 {
		p.giveBack(key("abc"))
	}
	require.NotContains(t, p.by, key("abc"))
	require.Equal(t, maxHeld/4, p.takeAll("def"), "it alone has half again")
	p.fill()
	require.Equal(t, maxHeld, p.len(), "every place can be taken")
	require.False(t, p.take(key("ghi")))
}

// Requests for one sandbox that starts, or is quiesced, leave room for those for others.
// Invariant: P8
func TestOneSandboxNeverHoldsAllPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cache := newOptions("unused")
		server, err := New(o)
		require.NoError(t, err)
		cache.Resolve("starting", routecache.Answer{Status: routecache.Starting, Hold: 20 * time.Second})
		cache.Put("quiesced", podRoute)
		cache.Quiesce("quiesced")
		replies := make(chan string, maxHeld)
		ask := func(id string) {
			answer, err := server.ask(encoded(t, get("8080-"+id+"."+domain)))
			if err != nil {
				t.Error(err)
			}
			reply, _ := decoded(t, answer).GetDynamicMetadata().AsMap()["berth"].(map[string]any)["reply"].(string)
			replies <- reply
		}
		for range maxHeld {
			go ask("starting")
		}
		synctest.Wait()
		require.Len(t, replies, maxHeld/2)
		for range maxHeld / 2 {
			require.Equal(t, "sandbox_starting", <-replies)
		}
		go ask("quiesced")
		synctest.Wait()
		require.Empty(t, replies, "it waits")
		cache.Resume("quiesced")
		require.Empty(t, <-replies)
		cache.Put("starting", podRoute)
		for range maxHeld / 2 {
			<-replies
		}
		require.Zero(t, server.held.len())
	})
}
