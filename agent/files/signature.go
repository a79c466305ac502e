package files

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"connectrpc.com/connect"
)

// CheckSignature checks the signature in the query of a request for /files. token is the sandbox's
// access token, of which the signature proves knowledge. The signature covers the path, the user, the
// operation (GET and HEAD read, POST writes) and the moment from which it is invalid, if it has one. The
// error says what is wrong, in words that a client may see.
//
// A request that passes must be served by [Service.Files], which takes the path and the user from
// nowhere else than the query that was checked.
func CheckSignature(r *http.Request, token string, now time.Time) error {
	q, err := parseQuery(r.URL.RawQuery)
	var refused *connect.Error
	switch {
	case errors.As(err, &refused):
		return errors.New(refused.Message()) // without its code
	case err != nil:
		return err
	case token == "":
		return errors.New("the sandbox has no access token, so it has no signatures")
	case !q.signed:
		return errors.New("signature is missing in the query")
	}
	var operation string
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		operation = "read"
	case http.MethodPost:
		operation = "write"
	default:
		return errors.New("a signature is for GET, HEAD or POST")
	}
	want := signature(q, operation, token)
	if subtle.ConstantTimeCompare([]byte(want), []byte(q.signature)) != 1 {
		return errors.New("signature does not match: it is for another path, user, operation, expiration or sandbox")
	}
	if q.expires != "" {
		// The signature covers the text, so it is one that the owner of the token wrote.
		at, err := strconv.ParseInt(q.expires, 10, 64)
		if err != nil {
			return errors.New("signature_expiration is not a time in seconds since 1970")
		}
		if now.Unix() > at {
			return errors.New("signature is already expired") // the words of E2B's agent, which clients look for
		}
	}
	return nil
}

// signature is what E2B's SDKs compute.
func signature(q query, operation, token string) string {
	text := q.path + ":" + operation + ":" + q.user + ":" + token
	if q.expires != "" {
		text += ":" + q.expires
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// query holds the parameters of /files.
type query struct {
	path, user         string
	signature, expires string
	signed             bool
}

// parseQuery reads the parameters of /files. The access check and the handler both use it, so that they
// never see different paths. Errors are InvalidArgument.
func parseQuery(raw string) (query, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return query{}, invalid("the query cannot be read: %w", err)
	}
	var q query
	for name, value := range values {
		if len(value) != 1 {
			return query{}, invalid("%.40q is given %d times in the query", name, len(value))
		}
		switch name {
		case "path":
			q.path = value[0]
		case "username":
			q.user = value[0]
		case "signature":
			q.signature, q.signed = value[0], true
		case "signature_expiration":
			q.expires = value[0]
		}
	}
	return q, nil
}
