package rest

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
)

// decodeBody decodes the body of a call, which was checked against its schema.
func decodeBody(r *http.Request, into any) error { return decode(bodyOf(r), into) }

// decodeLimit reads the parameter limit, which was checked against its schema.
func decodeLimit(r *http.Request, absent int) (int, error) {
	return number(r.URL.Query(), "limit", absent)
}

// decodeMetadata reads a filter: a query string whose keys and values are percent-encoded once more.
func decodeMetadata(text string) (map[string]string, error) {
	values, err := url.ParseQuery(text)
	if err != nil {
		return nil, invalid("metadata: %v", err)
	}
	all := make(map[string]string, len(values))
	for key, some := range values {
		k, err1 := url.QueryUnescape(key)
		v, err2 := url.QueryUnescape(some[0])
		if err := errors.Join(err1, err2); err != nil {
			return nil, invalid("metadata: %v", err)
		}
		if len(some) > 1 {
			return nil, invalid("metadata: %q: must be given once", k)
		}
		all[k] = v
	}
	return all, nil
}

// entries reads a list whose length the parameter limit bounds, and shows each entry. It returns
// the number of omitted entries.
func entries[S, T any](
	w *reply, r *http.Request, absent int,
	list func(ctx context.Context, most int) ([]S, int, error), show func(S) T,
) (all []T, truncated int, err error) {
	limit, err := decodeLimit(r, absent)
	if err != nil {
		return nil, 0, err
	}
	if err := w.rows(limit); err != nil {
		return nil, 0, err
	}
	found, truncated, err := list(r.Context(), limit)
	all = make([]T, 0, len(found))
	for _, s := range found {
		all = append(all, show(s))
	}
	return all, truncated, err
}

// idempotencyKey reads the header Idempotency-Key, "" for none.
func idempotencyKey(h http.Header) (string, error) {
	values := h.Values(keyHeader)
	if len(values) == 0 {
		return "", nil
	}
	key := values[0]
	if len(values) > 1 || len(key) < 1 || len(key) > maxIdempotencyKey || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", invalid("Idempotency-Key: must be one header of 1 to %d printable ASCII characters", maxIdempotencyKey)
	}
	return key, nil
}

// encodeToken returns a mark as the token of the next page. decodeToken is its inverse.
func encodeToken(m core.Mark) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(m.ClaimedAt.UnixMicro(), 10) + " " + m.ID))
}

// decodeToken reads the parameter nextToken.
func decodeToken(token string) (core.Mark, error) {
	if token == "" {
		return core.Mark{}, nil
	}
	if raw, err := base64.RawURLEncoding.DecodeString(token); err == nil {
		claimedAt, id, _ := strings.Cut(string(raw), " ")
		if micros, err := strconv.ParseInt(claimedAt, 10, 64); err == nil && id != "" {
			return core.Mark{ClaimedAt: time.UnixMicro(micros), ID: id}, nil
		}
	}
	return core.Mark{}, invalid("nextToken: must be the %s of the previous page, or be left out", NextTokenHeader)
}
