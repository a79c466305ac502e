package files

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/accounts"
	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// fenced is a Service that calls reach only with paths below the home: the test may be root.
type fenced struct{ *Service }

func below(paths ...string) error {
	for _, path := range paths {
		if !filepath.IsLocal(path) || strings.HasPrefix(path, "~") {
			return invalid("%q", path)
		}
	}
	return nil
}

func (s fenced) Stat(
	ctx context.Context, r *connect.Request[pb.StatRequest],
) (*connect.Response[pb.StatResponse], error) {
	if err := below(r.Msg.GetPath()); err != nil {
		return nil, err
	}
	return s.Service.Stat(ctx, r)
}

func (s fenced) MakeDir(ctx context.Context, r *connect.Request[pb.MakeDirRequest],
) (*connect.Response[pb.MakeDirResponse], error) {
	if err := below(r.Msg.GetPath()); err != nil {
		return nil, err
	}
	return s.Service.MakeDir(ctx, r)
}

func (s fenced) Move(
	ctx context.Context, r *connect.Request[pb.MoveRequest],
) (*connect.Response[pb.MoveResponse], error) {
	if err := below(r.Msg.GetSource(), r.Msg.GetDestination()); err != nil {
		return nil, err
	}
	return s.Service.Move(ctx, r)
}

func (s fenced) ListDir(ctx context.Context, r *connect.Request[pb.ListDirRequest],
) (*connect.Response[pb.ListDirResponse], error) {
	if err := below(r.Msg.GetPath()); err != nil {
		return nil, err
	}
	return s.Service.ListDir(ctx, r)
}

func (s fenced) Remove(ctx context.Context, r *connect.Request[pb.RemoveRequest],
) (*connect.Response[pb.RemoveResponse], error) {
	if err := below(r.Msg.GetPath()); err != nil {
		return nil, err
	}
	return s.Service.Remove(ctx, r)
}

func (s fenced) WatchDir(ctx context.Context, r *connect.Request[pb.WatchDirRequest],
	stream *connect.ServerStream[pb.WatchDirResponse]) error {
	if err := below(r.Msg.GetPath()); err != nil {
		return err
	}
	return s.Service.WatchDir(ctx, r, stream)
}

func (s fenced) CreateWatcher(ctx context.Context, r *connect.Request[pb.CreateWatcherRequest],
) (*connect.Response[pb.CreateWatcherResponse], error) {
	if err := below(r.Msg.GetPath()); err != nil {
		return nil, err
	}
	made, err := s.Service.CreateWatcher(ctx, r)
	if err == nil {
		_, _ = s.RemoveWatcher(ctx, connect.NewRequest(&pb.RemoveWatcherRequest{WatcherId: made.Msg.GetWatcherId()}))
	}
	return made, err
}

// homeOf is a Service without a server for the test's own user.
func homeOf(f *testing.F) *Service {
	account := self(f.TempDir())
	s, err := New(Options{Account: func(string) (accounts.Account, error) { return account, nil }})
	require.NoError(f, err)
	f.Cleanup(func() { _ = s.Close() })
	require.NoError(f, s.Write(account, "a/b", []byte("0123456789"), 0o644))
	return s
}

// FuzzCalls sends any bytes to each call, in each form that Connect has.
func FuzzCalls(f *testing.F) {
	calls := []string{"Stat", "MakeDir", "Move", "ListDir", "Remove", "WatchDir", "CreateWatcher", "GetWatcherEvents",
		"RemoveWatcher"}
	forms := []string{"application/json", "application/proto", "application/connect+json", "application/connect+proto"}
	envelope := func(flags byte, message string) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(message))), message...)
	}
	f.Add(uint8(0), uint8(0), "", "", []byte(`{"path":"a"}`))
	f.Add(uint8(1), uint8(0), "gzip", "Basic bWU6", []byte(`{"path":"c/d"}`))
	f.Add(uint8(2), uint8(0), "", "", []byte(`{"source":"c","destination":"e"}`))
	f.Add(uint8(3), uint8(0), "", "Basic x", []byte(`{"path":".","depth":4294967295}`))
	f.Add(uint8(4), uint8(1), "", "", []byte("\x0a\x01c"))
	f.Add(uint8(5), uint8(2), "", "", envelope(0, `{"path":".","recursive":true,"includeEntry":true}`))
	f.Add(uint8(5), uint8(3), "", "", envelope(3, "\xff\xff"))
	f.Add(uint8(7), uint8(0), "", "", []byte(`{"watcherId":"w"}`))
	s := homeOf(f)
	_, handler := pb.NewFilesystemHandler(fenced{s}, connect.WithReadMaxBytes(maxRequest))
	f.Fuzz(func(t *testing.T, call, form uint8, coding, user string, body []byte) {
		path := "/filesystem.Filesystem/" + calls[int(call)%len(calls)]
		r := httptest.NewRequest(http.MethodPost, path, bytes.NewReader(body))
		r.Header.Set("Content-Type", forms[int(form)%len(forms)])
		r.Header.Set("Content-Encoding", coding)
		r.Header.Set("Connect-Content-Encoding", coding)
		r.Header.Set("Connect-Timeout-Ms", "20") // WatchDir would not end
		if user != "" {
			r.Header.Set("Authorization", user)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		answer, err := io.ReadAll(w.Body)
		require.NoError(t, err)
		require.NotEqual(t, http.StatusInternalServerError, w.Code, "%s", answer)
		if text := string(answer); strings.Contains(text, `"code":"internal"`) {
			require.Regexp(t, `"message":"(protocol error|corrupt response|unmarshal end stream message): `, text,
				"only package connect's, for a bad envelope")
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		require.Zero(t, s.watches)
	})
}

// FuzzDownload asks for a file of ten bytes with any headers: each part of an answer is of the file.
func FuzzDownload(f *testing.F) {
	const contents = "0123456789"
	f.Add("bytes=2-4", "", "")
	f.Add("bytes=-3,0-0,5-", "\"x\"", "gzip")
	f.Add("bytes=9-2", "", "gzip;q=0.0")
	f.Add("bytes=99999999999999999999-", "", "identity, gzip;q=1")
	s := homeOf(f)
	f.Fuzz(func(t *testing.T, span, match, coding string) {
		r := httptest.NewRequest(http.MethodGet, Path+"?path=a/b", http.NoBody)
		for name, value := range map[string]string{"Range": span, "If-Range": match, "Accept-Encoding": coding} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		w := httptest.NewRecorder()
		s.Files().ServeHTTP(w, r)
		body := w.Body.String()
		if w.Header().Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(w.Body)
			require.NoError(t, err)
			text, err := io.ReadAll(z)
			require.NoError(t, err)
			body = string(text)
			require.Equal(t, http.StatusOK, w.Code)
		}
		switch w.Code {
		case http.StatusOK:
			require.Equal(t, contents, body)
		case http.StatusRequestedRangeNotSatisfiable:
		case http.StatusPartialContent:
			_, params, err := mime.ParseMediaType(w.Header().Get("Content-Type"))
			require.NoError(t, err)
			if params["boundary"] == "" {
				require.Contains(t, contents, body)
				return
			}
			parts := multipart.NewReader(strings.NewReader(body), params["boundary"])
			for part, err := parts.NextPart(); err == nil; part, err = parts.NextPart() {
				text, err := io.ReadAll(part)
				require.NoError(t, err)
				require.Contains(t, contents, string(text))
			}
		default:
			require.Fail(t, "unexpected status", "%d %s", w.Code, body)
		}
	})
}
