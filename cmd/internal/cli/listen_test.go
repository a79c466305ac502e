package cli_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/internal/pipetest"
)

// onPipes serves h with a limit of connections and calls f with a function that connects.
func onPipes(t *testing.T, most int, h http.HandlerFunc, f func(t *testing.T, connect func() net.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		listener := pipetest.Listen()
		s := cli.ServeOn("--listen", listener, most)
		served := make(chan error, 1)
		go func() { served <- s.Serve(h) }()
		defer func() {
			listener.HangUp()
			s.Stop(t.Context())
			require.NoError(t, <-served)
		}()
		f(t, listener.Connect)
	})
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	require.NoError(t, err)
}

func code(t *testing.T, c net.Conn) int {
	t.Helper()
	w, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, w.Body)
	require.NoError(t, err)
	return w.StatusCode
}

// closed waits until the server has closed the connection.
func closed(c net.Conn) { _, _ = io.Copy(io.Discard, c) }

func TestAnswersForbidBrowsersToGuessTypes(t *testing.T) {
	onPipes(t, 10, func(http.ResponseWriter, *http.Request) {}, func(t *testing.T, connect func() net.Conn) {
		c := connect()
		send(t, c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		defer answer.Body.Close()
		require.Equal(t, []string{"nosniff"}, answer.Header["X-Content-Type-Options"])
	})
}

func TestEveryCallHasDeadlines(t *testing.T) {
	const get = "GET / HTTP/1.1\r\nHost: a\r\n"
	for name, c := range map[string]struct {
		h    http.HandlerFunc
		send string
		want time.Duration
	}{
		"no request":    {nil, "", cli.HeaderTimeout},
		"half a header": {nil, get, cli.HeaderTimeout},
		"no body that the handler reads": {func(_ http.ResponseWriter, r *http.Request) {
			_, err := io.ReadAll(r.Body)
			if err == nil {
				panic("there is none")
			}
		}, get + "Content-Length: 1\r\n\r\n", cli.ReadTimeout},
		"no body that the handler does not read": {func(http.ResponseWriter, *http.Request) {}, get + "Content-Length: 1\r\n\r\n", cli.ReadTimeout},
		"no other request":                       {func(http.ResponseWriter, *http.Request) {}, get + "\r\n", cli.IdleTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			onPipes(t, 10, c.h, func(t *testing.T, connect func() net.Conn) {
				began := time.Now()
				client := connect()
				send(t, client, c.send)
				closed(client)
				require.Equal(t, c.want, time.Since(began))
			})
		})
	}
	t.Run("an answer that is not read", func(t *testing.T) {
		ended := make(chan error, 1)
		onPipes(t, 10, func(w http.ResponseWriter, _ *http.Request) {
			for {
				if _, err := w.Write(make([]byte, 1<<20)); err != nil {
					ended <- err
					return
				}
			}
		}, func(t *testing.T, connect func() net.Conn) {
			began := time.Now()
			send(t, connect(), get+"\r\n")
			synctest.Wait()
			time.Sleep(cli.WriteTimeout)
			synctest.Wait()
			require.Len(t, ended, 1)
			require.Equal(t, cli.WriteTimeout, time.Since(began))
		})
	})
}

func TestIdleConnectionsAreClosedForNewOnes(t *testing.T) {
	const get = "GET / HTTP/1.1\r\nHost: a\r\n"
	var finish chan struct{}
	onPipes(t, 3, func(_ http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			<-finish
		}
	}, func(t *testing.T, connect func() net.Conn) {
		finish = make(chan struct{}, 10) // of the bubble
		idle := connect()
		send(t, idle, get+"\r\n")
		require.Equal(t, 200, code(t, idle))
		synctest.Wait()
		time.Sleep(time.Second)
		slow, busy := connect(), connect()
		send(t, slow, get)
		send(t, busy, "POST / HTTP/1.1\r\nHost: a\r\n\r\n")
		synctest.Wait()

		// The connection that has waited longest is closed first. One with a call stays.
		began := time.Now()
		for range 2 { // the idle one, then the slow one
			next := connect()
			send(t, next, get+"\r\n")
			require.Equal(t, 200, code(t, next))
			time.Sleep(time.Second)
		}
		closed(idle)
		closed(slow)
		require.Equal(t, 2*time.Second, time.Since(began), "they were closed before their deadlines")
		finish <- struct{}{}
		require.Equal(t, 200, code(t, busy))
	})
}

func TestConnectionsWithACallAreNotClosed(t *testing.T) {
	const post = "POST / HTTP/1.1\r\nHost: a\r\n\r\n"
	var finish chan struct{}
	onPipes(t, 2, func(http.ResponseWriter, *http.Request) { <-finish }, func(t *testing.T, connect func() net.Conn) {
		finish = make(chan struct{}, 10) // of the bubble
		one, two := connect(), connect()
		send(t, one, post)
		send(t, two, post)
		synctest.Wait()
		began := time.Now()
		closed(connect()) // there is no room
		require.Zero(t, time.Since(began))
		finish <- struct{}{}
		finish <- struct{}{}
		require.Equal(t, 200, code(t, one))
		require.Equal(t, 200, code(t, two))
		synctest.Wait()
		three := connect()
		send(t, three, post)
		finish <- struct{}{}
		require.Equal(t, 200, code(t, three))
	})
}
