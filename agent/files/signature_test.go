package files

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

const testToken = "0123456789abcdef"

// signed returns the query of a link, as E2B's SDKs make it.
func signed(path, operation, user, expires string) url.Values {
	q := url.Values{"signature": {signature(query{path: path, user: user, expires: expires}, operation, testToken)}}
	for name, value := range map[string]string{"path": path, "username": user, "signature_expiration": expires} {
		if value != "" {
			q.Set(name, value)
		}
	}
	return q
}

// What both SDKs compute for this path, user, token and moment.
func TestSignatureIsThatOfTheSDKs(t *testing.T) {
	q := query{path: "/home/user/a b.txt", user: "user", expires: "1800000000"}
	require.Equal(t, "v1_1owhXpdEQw4eITr0wfzhZ/2IGsTOzWSY3TYS6E9biVM", signature(q, "read", testToken))
	require.Equal(t, "v1_Hz0rS9QSUbOD2Zuqic6qqRrWMRKYVRXSsFxH6D0FIdM", signature(query{path: "x"}, "write", testToken))
}

func TestSignatureOpensOnePathForOneUser(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	later := strconv.FormatInt(now.Unix()+10, 10)
	with := func(q url.Values, name, value string) url.Values {
		q.Set(name, value)
		return q
	}
	for name, c := range map[string]struct {
		method, raw, wrong, token string
		q                         url.Values
	}{
		"read":        {q: signed("/a", "read", "", "")},
		"head":        {method: http.MethodHead, q: signed("/a", "read", "", "")},
		"write":       {method: http.MethodPost, q: signed("/a", "write", "root", later)},
		"form":        {method: http.MethodPost, q: signed("", "write", "", "")},
		"last second": {q: signed("/a", "read", "", strconv.FormatInt(now.Unix(), 10))},
		"expired": {
			q: signed("/a", "read", "", strconv.FormatInt(now.Unix()-1, 10)), wrong: "signature is already expired",
		},
		"read for write": {method: http.MethodPost, q: signed("/a", "read", "", ""), wrong: "does not match"},
		"write for read": {q: signed("/a", "write", "", ""), wrong: "does not match"},
		"delete":         {method: http.MethodDelete, q: signed("/a", "write", "", ""), wrong: "GET, HEAD or POST"},
		"other path":     {q: with(signed("/a", "read", "", ""), "path", "/b"), wrong: "does not match"},
		"other user":     {q: with(signed("/a", "read", "", ""), "username", "root"), wrong: "does not match"},
		"expiration longer": {
			q: with(signed("/a", "read", "", later), "signature_expiration", later+"0"), wrong: "does not match",
		},
		"expiration added": {q: with(signed("/a", "read", "", ""), "signature_expiration", later), wrong: "does not match"},
		"no time":          {q: signed("/a", "read", "", "soon"), wrong: "not a time"},
		"empty signature":  {q: url.Values{"path": {"/a"}, "signature": {""}}, wrong: "does not match"},
		"no signature":     {q: url.Values{"path": {"/a"}}, wrong: "missing"},
		"path twice":       {raw: signed("/a", "read", "", "").Encode() + "&path=/b", wrong: "2 times"},
		"semicolon":        {raw: "path=/a;signature=v1_x", wrong: "cannot be read"},
		"no token":         {q: signed("/a", "read", "", ""), token: "-", wrong: "no access token"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.method == "" {
				c.method = http.MethodGet
			}
			if c.raw == "" {
				c.raw = c.q.Encode()
			}
			token := testToken
			if c.token != "" {
				token = ""
			}
			err := CheckSignature(httptest.NewRequest(c.method, Path+"?"+c.raw, nil), token, now)
			if c.wrong != "" {
				require.ErrorContains(t, err, c.wrong)
				return
			}
			require.NoError(t, err)
		})
	}
}

func TestSignedRequestTakesNoUserFromElsewhere(t *testing.T) {
	for _, c := range []struct{ query, want string }{
		{"path=a", "basic"},
		{"path=a&username=named", "named"},
		{"path=a&signature=v1_x", ""},
		{"path=a&signature=v1_x&username=named", "named"},
	} {
		r := httptest.NewRequest(http.MethodGet, Path+"?"+c.query, nil)
		r.SetBasicAuth("basic", "")
		q, err := parseQuery(r.URL.RawQuery)
		require.NoError(t, err)
		user, err := fileUser(r, q)
		require.NoError(t, err)
		require.Equal(t, c.want, user, c.query)
	}
}

func TestUserThatCannotBeReadIsRefused(t *testing.T) {
	s := start(t)
	s.put("a", "x")
	for _, c := range []struct {
		query  string
		status int
	}{{"", 401}, {"&username=me", 200}, {"&signature=v1_x", 200}} {
		answer, text := s.do(http.MethodGet, pathQuery("a")+c.query, nil, "Authorization", "Bearer me")
		require.Equal(t, c.status, answer.StatusCode, "%q: %s", c.query, text)
	}
	r := connect.NewRequest(&pb.StatRequest{Path: "a"})
	r.Header().Set("Authorization", "Bearer me")
	_, err := s.calls.Stat(t.Context(), r)
	require.Equal(t, connect.CodeUnauthenticated, connect.CodeOf(err))
}

func FuzzCheckSignature(f *testing.F) {
	f.Add("path=/a&signature=v1_x", "GET")
	f.Add(signed("/a", "read", "u", "1700000001").Encode(), "GET")
	f.Add(signed("", "write", "", "").Encode(), "POST")
	f.Add("signature=&signature=%zz;", "HEAD")
	f.Fuzz(func(t *testing.T, raw, method string) {
		r := &http.Request{Method: method, URL: &url.URL{Path: Path, RawQuery: raw}, Header: http.Header{}}
		now := time.Unix(1_700_000_000, 0)
		if CheckSignature(r, testToken, now) != nil {
			return
		}
		// What passes is what the token signs, and what the handler takes.
		q, err := parseQuery(raw)
		require.NoError(t, err)
		operation := "read"
		if method == http.MethodPost {
			operation = "write"
		}
		require.Equal(t, signature(q, operation, testToken), r.URL.Query().Get("signature"))
		require.Equal(t, q.path, r.URL.Query().Get("path"))
		require.Error(t, CheckSignature(r, testToken+"x", now))
	})
}
