package controlclient_test

import (
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Invariant: I3
func TestNoGoodbyeWhileAnAnswerIsUnread(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		w.admissions.give()
		w.stop()
		for {
			m, err := p.Recv()
			if err != nil {
				break
			}
			require.NotNil(t, m.GetPing(), "%v", m)
		}
		p.end <- nil
	})
}

func TestGoodbyeIsTheLastMessage(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		began := w.now()
		w.stop()
		require.NotNil(t, p.next().GetGoodbye())
		p.send(2, release("one")) // it arrives too late for an acknowledgement
		_, err := p.Recv()
		require.ErrorIs(t, err, io.EOF, "something followed Goodbye")
		require.Empty(t, w.ended, "the allocator had not heard Goodbye yet")
		p.end <- nil
		require.NoError(t, <-w.ended)
		w.ended <- nil
		require.Equal(t, began, w.now())
		require.False(t, w.client.Connected())
	})
}

// A router that ends while no replica leads must not delay releases by max-stale.
func TestGoodbyeIsSentToTheNextLeader(t *testing.T) {
	for name, between := range map[string]func(w *world){
		"nothing answers": func(*world) { time.Sleep(3 * time.Second) },
		"black holes":     func(w *world) { w.blackHole("a"); time.Sleep(3 * time.Second) },
		"a follower does": func(w *world) { w.serve("b", names("")); time.Sleep(3 * time.Second) },
		"an old leader does": func(w *world) {
			w.serve("b", func(*peer) error { return status.Error(codes.FailedPrecondition, "this replica is stopping") })
			time.Sleep(3 * time.Second)
		},
	} {
		for when, early := range map[string]bool{"lost before": true, "lost by Goodbye": false} {
			t.Run(name+", "+when, func(t *testing.T) {
				run(t, []string{"a", "b"}, func(w *world) {
					w.serve("a", nil)
					p := w.joined(route("one", "10.0.0.1"))
					lose := func() {
						w.refuse("a")
						p.end <- status.Error(codes.Unavailable, "gone")
					}
					if early {
						lose()
						time.Sleep(time.Second)
						w.stop()
					} else {
						w.stop()
						require.NotNil(t, p.next().GetGoodbye())
						lose()
					}
					between(w)
					require.Empty(t, w.ended, "no leader has received Goodbye")
					w.serve("a", nil)
					began := w.now()
					p, join, _ := w.accept()
					require.Equal(t, routerID, join.GetRouterId())
					require.NotNil(t, p.next().GetGoodbye())
					_, err := p.Recv()
					require.ErrorIs(t, err, io.EOF)
					p.end <- nil
					require.NoError(t, <-w.ended)
					w.ended <- nil
					require.LessOrEqual(t, w.now()-began, 2*time.Second)
				})
			})
		}
	}
}

// Otherwise a leader of another journal would hand out no pod until this router has expired.
func TestStoppingRouterJoinsAsNotServing(t *testing.T) {
	for name, leaves := range map[string]bool{"it goes on": false, "it leaves": true} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p := w.joined(route("one", "10.0.0.1"))
				w.refuse("a")
				p.end <- status.Error(codes.Unavailable, "gone")
				if leaves {
					w.stop()
				}
				time.Sleep(time.Second)
				w.serve("a", nil)
				p, join, _ := w.accept()
				require.Equal(t, !leaves, join.GetServing())
				if leaves {
					require.NotNil(t, p.next().GetGoodbye())
					p.end <- nil
					require.NoError(t, <-w.ended)
					w.ended <- nil
				}
			})
		})
	}
}

func TestRouterEndsInTimeWithoutGoodbye(t *testing.T) {
	for name, c := range map[string]struct {
		leave func(w *world)
		// waits: until the end of its time.
		waits bool
	}{
		"no leader":             {func(*world) {}, true},
		"a leader that hangs":   {func(w *world) { w.serve("a", nil) }, true},
		"an answer is not read": {func(w *world) { w.admissions.give() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p := w.joined()
				w.refuse("a")
				p.end <- status.Error(codes.Unavailable, "gone")
				synctest.Wait()
				c.leave(w)
				began := w.now()
				w.stop()
				time.AfterFunc(10*time.Second, w.giveUp)
				require.NoError(t, <-w.ended)
				w.ended <- nil
				if c.waits {
					require.Equal(t, 10*time.Second, w.now()-began)
				} else {
					require.Less(t, w.now()-began, 3*time.Second)
				}
			})
		})
	}
	t.Run("no allocator knows it", func(t *testing.T) {
		run(t, []string{"a", "b"}, func(w *world) {
			w.serve("a", names(""))
			w.begin()
			time.Sleep(10 * time.Second)
			began := w.now()
			w.stop()
			require.NoError(t, <-w.ended)
			w.ended <- nil
			require.LessOrEqual(t, w.now()-began, time.Second)
		})
	})
}

func TestEarlyGoodbyeFollowsJoin(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.stop()
		w.serve("a", nil)
		w.begin()
		time.Sleep(time.Minute)
		require.NoError(t, <-w.ended)
		w.ended <- nil
		for range len(w.streams) {
			p := <-w.streams
			m, err := p.Recv()
			if err == nil {
				require.NotNil(t, m.GetJoin())
			}
		}
	})
}

func TestStopDoesNotWaitForASilentAllocator(t *testing.T) {
	for name, prepare := range map[string]func(*world){
		"connecting": func(w *world) { w.blackHole("a") },
		"pausing":    func(*world) {},
		"joining":    func(w *world) { w.serve("a", nil); w.accept() },
		"joined":     func(w *world) { w.serve("a", nil); w.joined() },
		"not reading": func(w *world) {
			w.serve("a", nil)
			w.joined()
			for w.client.Ask(strings.Repeat("x", 57), false) {
				synctest.Wait()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				prepare(w)
				w.begin()
				synctest.Wait()
				began := w.now()
				w.stop()
				time.AfterFunc(time.Second, w.giveUp)
				require.NoError(t, <-w.ended)
				w.ended <- nil
				require.LessOrEqual(t, w.now()-began, time.Second)
			})
		})
	}
}
