package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
)

// visitor is a browser at a console. Go's own jar keeps no Secure cookie for plain HTTP, as browsers do on loopback.
type visitor struct {
	t       *testing.T
	base    *url.URL // of the console
	client  *http.Client
	cookies []*http.Cookie
}

func (e *env) visit(console string) *visitor {
	base, err := url.Parse(console)
	require.NoError(e.t, err)
	return &visitor{e.t, base, &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}, nil}
}

// send sends a form, or gets a page without one.
func (v *visitor) send(path string, form url.Values) (code int, location, body string) {
	v.t.Helper()
	method := http.MethodGet
	if form != nil {
		method = http.MethodPost
	}
	target, err := v.base.Parse(path)
	require.NoError(v.t, err)
	r, err := http.NewRequestWithContext(v.t.Context(), method, target.String(), strings.NewReader(form.Encode()))
	require.NoError(v.t, err)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Origin", v.base.Scheme+"://"+v.base.Host)
	for _, c := range v.cookies {
		r.AddCookie(c)
	}
	w, err := v.client.Do(r)
	require.NoError(v.t, err)
	defer w.Body.Close()
	raw, err := io.ReadAll(w.Body)
	require.NoError(v.t, err)
	v.cookies = append(v.cookies, w.Cookies()...)
	return w.StatusCode, w.Header.Get("Location"), string(raw)
}

// Each replica serves the console and takes the sessions of the others.
// Invariant: P26
func TestConsoleOfEveryReplicaEndsASandbox(t *testing.T) {
	e := startHere(t, 2)
	e.waitWarm(2)
	key, revoke := e.newKey("blue", access.Member)
	first, second := e.visit(e.stack.Allocators[0].Console), e.visit(e.stack.Allocators[1].Console)
	code, _, body := first.send("/console/sign-in", url.Values{"key": {access.NewKey()}})
	require.Equal(t, http.StatusUnprocessableEntity, code, body)
	s := sandboxOf(t, e.as(key, http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`"}`)).SandboxID
	e.eventually(func() error {
		if code, _, body = first.send("/console/sign-in", url.Values{"key": {key}}); code != http.StatusSeeOther {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	for _, c := range first.cookies { // the cookie's name has the port of the replica
		name := strings.Replace(c.Name, first.base.Port(), second.base.Port(), 1)
		second.cookies = append(second.cookies, &http.Cookie{Name: name, Value: c.Value})
	}

	pages := []string{"", "pools", "pools/" + e.pool, "connect", "sandboxes", "sandboxes/" + s}
	for _, v := range []*visitor{first, second} {
		for _, page := range pages {
			code, _, body := v.send("/console/"+page, nil)
			require.Equal(t, http.StatusOK, code, "%s: %s", page, body)
			if strings.HasPrefix(page, "sandboxes") {
				require.Contains(t, body, s, page)
			}
		}
	}
	code, _, body = second.send("/console/sandboxes/"+s+"/end", url.Values{})
	require.Equal(t, http.StatusSeeOther, code, body)
	code, _, body = first.send("/console/sandboxes/"+s, nil)
	require.Equal(t, http.StatusOK, code, body)
	require.Contains(t, body, "Routers acknowledge the release")
	revoke()
	e.eventually(func() error {
		if code, location, _ := first.send("/console/", nil); !strings.HasPrefix(location, "/console/sign-in") {
			return fmt.Errorf("%d %s", code, location)
		}
		return nil
	})
}

func TestCommandOpensAConsoleOfItsOwn(t *testing.T) {
	e := startHere(t, 1)
	c := e.commandLine().command("console", "--no-open")
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	v := e.visit(strings.TrimSpace(line))
	code, _, body := v.send("/console/", nil)
	require.Equal(t, http.StatusSeeOther, code, body)
	code, _, body = v.send(strings.TrimSpace(line), nil)
	require.Equal(t, http.StatusSeeOther, code, body)
	code, _, body = v.send("/console/", nil)
	require.Equal(t, http.StatusOK, code, body)
	require.Contains(t, body, "Routers")
	require.NoError(t, c.Process.Signal(os.Interrupt))
	require.NoError(t, c.Wait())
}
