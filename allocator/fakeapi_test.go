package allocator

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/kube"
)

// silence is the answer to a watch in which nothing happens.
const silence = "silence"

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// fakeAPI answers calls to the API server without a network, so that it can be
// used where time is not real.
type fakeAPI func(*http.Request) (code int, answer any)

func (f fakeAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	code, answer := f(r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if code >= 400 {
		answer = metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code), Reason: metav1.StatusReason(http.StatusText(code)), Message: "as the test wants it"}
	}
	raw, err := json.Marshal(answer)
	if err != nil {
		return nil, err
	}
	body := io.Reader(bytes.NewReader(raw))
	if answer == silence {
		body = readerFunc(func([]byte) (int, error) { <-r.Context().Done(); return 0, io.EOF })
	}
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(body),
	}, nil
}

func (f fakeAPI) clients(t testing.TB) *kube.Clients {
	t.Helper()
	c, err := kube.NewClients(&rest.Config{Host: "http://api", Transport: f}, 0, 0)
	require.NoError(t, err)
	return c
}
