package apierror_test

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
)

func TestBodyIsTheDocumentedShape(t *testing.T) {
	for want, e := range map[string]apierror.Error{
		`{"code":404,"reason":"not_found","message":"m"}`: {Code: 404, Reason: apierror.NotFound, Message: "m"},
		`{"code":410,"reason":"sandbox_gone","message":"m","sandboxID":"s","requestID":"r"}`: {
			Code: 410, Reason: apierror.SandboxGone, Message: "m", SandboxID: "s", RequestID: "r", RetryAfter: 7,
		},
		`{"code":400,"reason":"bad_host","message":"\"\ufffd<b>"}`: {Code: 400, Reason: apierror.BadHost, Message: "\"\xff<b>"},
	} {
		require.Equal(t, want, string(e.JSON()))
		require.True(t, json.Valid(e.JSON()))
	}
}

func TestRetryAfterIsAHeaderOnlyWhenThereIsOne(t *testing.T) {
	for after, want := range map[int]string{0: "", 1: "1", 30: "30"} {
		w := httptest.NewRecorder()
		(&apierror.Error{Code: 503, Reason: apierror.Timeout, RetryAfter: after}).Write(w)
		require.Equal(t, 503, w.Code)
		require.Equal(t, want, w.Header().Get("Retry-After"))
		require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	}
}

func ExampleError_Write() {
	w := httptest.NewRecorder()
	(&apierror.Error{Code: 410, Reason: apierror.SandboxGone, Message: "this sandbox has been released", SandboxID: "k3x9"}).Write(w)
	fmt.Println(w.Code, w.Body)
	// Output: 410 {"code":410,"reason":"sandbox_gone","message":"this sandbox has been released","sandboxID":"k3x9"}
}

func ExampleError_Error() {
	var err error = &apierror.Error{Code: 404, Reason: apierror.PoolNotFound, Message: "there is no such pool"}
	fmt.Println(err)
	// Output: pool_not_found: there is no such pool
}

func ExampleError_JSON() {
	fmt.Printf("%s\n", (&apierror.Error{Code: 400, Reason: apierror.BadPort, Message: "port 0"}).JSON())
	// Output: {"code":400,"reason":"bad_port","message":"port 0"}
}
