package rest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/berth-sandbox/berth/allocator/core"
)

// read reads a UTF-8 body.
func read(body io.Reader) ([]byte, error) {
	raw, err := io.ReadAll(body)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read body: %w", err)
	case !utf8.Valid(raw): // the decoder would replace invalid bytes
		return nil, invalid("body: must be UTF-8")
	}
	return raw, nil
}

// decodeObject decodes a JSON object with no other fields than those of into. An empty body is an
// empty object.
func decodeObject(body io.Reader, into any) error {
	raw, err := read(body)
	if err != nil {
		return err
	}
	text := strings.TrimSpace(string(raw))
	if text == "" {
		return nil
	}
	if text[0] != '{' { // null too
		return invalid("body: must be a JSON object")
	}
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return invalid("body: %v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return invalid("body: must be one JSON object")
	}
	return nil
}

// decodeLimit reads the parameter limit.
func decodeLimit(r *http.Request, absent, most int) (int, error) {
	text := r.URL.Query().Get("limit")
	if text == "" && !r.URL.Query().Has("limit") {
		return absent, nil
	}
	limit, err := strconv.Atoi(text)
	if err != nil || limit < 1 || limit > most || len(r.URL.Query()["limit"]) > 1 {
		return 0, invalid("limit: %q: must be one number, 1 to %d", text, most)
	}
	return limit, nil
}

// entries reads a list whose length the parameter limit bounds, and shows each entry. It returns
// the number of omitted entries.
func entries[S, T any](
	w *reply, r *http.Request, absent, most int,
	list func(ctx context.Context, most int) ([]S, int, error), show func(S) T,
) (all []T, truncated int, err error) {
	limit, err := decodeLimit(r, absent, most)
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

// onlyParameters refuses query parameters other than the known ones.
func onlyParameters(values url.Values, known []string) error {
	maps.DeleteFunc(values, func(name string, _ []string) bool { return slices.Contains(known, name) })
	if len(values) > 0 {
		return notImplemented("parameter %s: not supported by this version; leave it out", strings.Join(slices.Sorted(maps.Keys(values)), ", "))
	}
	return nil
}

// idempotencyKey reads the header Idempotency-Key, "" for none.
func idempotencyKey(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
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
func decodeToken(tokens []string) (core.Mark, error) {
	if len(tokens) == 0 || len(tokens) == 1 && tokens[0] == "" {
		return core.Mark{}, nil
	}
	if raw, err := base64.RawURLEncoding.DecodeString(tokens[0]); err == nil && len(tokens) == 1 {
		claimedAt, id, _ := strings.Cut(string(raw), " ")
		if micros, err := strconv.ParseInt(claimedAt, 10, 64); err == nil && id != "" {
			return core.Mark{ClaimedAt: time.UnixMicro(micros), ID: id}, nil
		}
	}
	return core.Mark{}, invalid("nextToken: must be the %s of the previous page, or be left out", NextTokenHeader)
}
