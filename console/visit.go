package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
)

// visit is a request of a person who is signed in.
type visit struct {
	*http.Request
	w      http.ResponseWriter
	ctx    context.Context // bounds the calls of the page
	api    *client.Client
	caller *openapi.Caller
	c      *Console
}

// api returns a client for the calls of one request. It makes no call.
func (c *Console) api(r *http.Request, key string) (*client.Client, error) {
	return client.New(client.Options{URL: c.o.APIURL, Key: key, HTTP: &http.Client{
		Transport:     from{c.o.API, r},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}})
}

// from carries calls that are made for a request.
type from struct {
	next http.RoundTripper
	r    *http.Request
}

// RoundTrip implements http.RoundTripper.
func (f from) RoundTrip(r *http.Request) (*http.Response, error) {
	return f.next.RoundTrip(r.WithContext(context.WithValue(r.Context(), requestKey{}, f.r)))
}

// visited returns the handler of a page: it opens the session, asks the API whose key that is, and shows what f
// returns. A page that is zero was answered by f itself.
func (c *Console) visited(f func(*visit) (page, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s, err := c.session(r)
		if err != nil {
			if fromElsewhere(r) {
				c.write(w, r, http.StatusOK, page{name: "onward", Title: "Berth", Data: returnPath(r.URL.RequestURI())}, nil)
				return
			}
			why := ""
			if _, err := r.Cookie(cookieOf(r)); err == nil {
				why = "ended"
			}
			c.toSignIn(w, r, why)
			return
		}
		ctx, cancel := bounded(r, pageWait)
		defer cancel()
		v := &visit{Request: r.WithContext(ctx), w: w, ctx: ctx, c: c}
		if v.api, err = c.api(r, s.key); err == nil {
			v.caller, err = v.api.Caller(ctx)
		}
		var p page
		if err == nil && v.ParseForm() != nil {
			err = &failure{http.StatusRequestEntityTooLarge, "The form is too large, or is not one."}
		}
		if err == nil {
			p, err = f(v)
		}
		switch {
		case statusOf(err) == http.StatusUnauthorized:
			if !c.o.Open {
				end(w, r)
			}
			c.toSignIn(w, r, "key")
		case err != nil:
			status, p := failed(err)
			c.write(w, r, status, p, v)
		case p.name != "":
			c.write(w, r, p.status, p, v)
		}
	}
}

// redirect leads on after a form. It answers the request.
func (v *visit) redirect(to string) (page, error) {
	http.Redirect(v.w, v.Request, to, http.StatusSeeOther)
	return page{}, nil
}

// may reports whether the person has a role. The API decides: this only leaves out what it would refuse.
func (v *visit) may(role openapi.CallerRole) bool { return rank[v.caller.Role] >= rank[role] }

var rank = map[openapi.CallerRole]int{
	openapi.ReadOnly: 1, openapi.Member: 2, openapi.Admin: 3,
}

// needs returns the refusal of a page that is for a role only.
func (v *visit) needs(role openapi.CallerRole) error {
	if v.may(role) {
		return nil
	}
	return &failure{http.StatusForbidden,
		fmt.Sprintf("This page needs a key with the role %s. Yours has the role %s.", role, v.caller.Role)}
}

func apiError(err error) *client.Error {
	var e *client.Error
	errors.As(err, &e)
	return e
}

// reasonOf says in words why a call failed.
func reasonOf(err error) string {
	if e := apiError(err); e != nil {
		return or(e.Message, http.StatusText(e.Status))
	}
	var f *failure
	switch {
	case errors.As(err, &f):
		return f.text
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, errSlow):
		return "the API did not answer in time; try again"
	}
	return "the API cannot be reached; try again"
}

// sentence returns a message with a capital letter at its begin and a full stop at its end.
func sentence(text string) string {
	first, size := utf8.DecodeRuneInString(text)
	if size == 0 {
		return ""
	}
	text = string(unicode.ToUpper(first)) + text[size:]
	if strings.HasSuffix(text, ".") || strings.HasSuffix(text, "?") {
		return text
	}
	return text + "."
}

// failed returns the page that says why there is no other.
func failed(err error) (int, page) {
	status := http.StatusServiceUnavailable
	var f *failure
	if errors.As(err, &f) {
		status = f.status
	} else if e := apiError(err); e != nil && e.Status >= http.StatusBadRequest {
		status = e.Status
	}
	title := "This page cannot be shown"
	switch status {
	case http.StatusNotFound, http.StatusGone:
		title = "Not found"
	case http.StatusForbidden:
		title = "Not allowed"
	}
	live := status >= http.StatusInternalServerError
	return status, page{name: "failed", Title: title, Live: live, Data: sentence(reasonOf(err))}
}
