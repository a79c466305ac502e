package process

import (
	"bytes"
	"encoding/binary"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// noSandbox has no users, so that nothing is started.
type noSandbox struct{}

func (noSandbox) Config() *initbox.Config { return &initbox.Config{} }

func (noSandbox) Account(string) (accounts.Account, error) {
	return accounts.Account{}, new(accounts.UnknownError)
}

// envelope is a message of a stream.
func envelope(flags byte, message string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(message))), message...)
}

// FuzzCalls sends any bytes to each call, in each form that Connect has.
func FuzzCalls(f *testing.F) {
	calls := []string{"List", "Start", "Connect", "Update", "SendInput", "StreamInput", "CloseStdin", "SendSignal"}
	forms := []string{"application/json", "application/proto", "application/connect+json", "application/connect+proto",
		"application/grpc", "application/grpc-web+json"}
	f.Add(uint8(0), uint8(0), "", "50", []byte(`{}`))
	f.Add(uint8(1), uint8(2), "", "50",
		envelope(0, `{"process":{"cmd":"/bin/bash","args":["-l"],"envs":{"A":"b"}},"pty":{"size":{}}}`))
	f.Add(uint8(2), uint8(2), "", "x", envelope(0, `{"process":{"tag":"a"}}`))
	f.Add(uint8(3), uint8(0), "", "1", []byte(`{"process":{"pid":1},"pty":{"size":{"cols":70000}}}`))
	f.Add(uint8(4), uint8(0), "gzip", "0", []byte(`{"process":{"pid":1},"input":{"stdin":"YQ=="}}`))
	f.Add(uint8(5), uint8(2), "", "",
		append(envelope(0, `{"start":{"process":{"pid":1}}}`), envelope(0, `{"keepalive":{}}`)...))
	f.Add(uint8(5), uint8(3), "", "", envelope(3, "\xff\xff"))
	f.Add(uint8(7), uint8(1), "", "", []byte{0x0a, 2, 8, 1, 0x10, 15})
	table := children.New()
	freezer, err := freeze.New(freeze.Options{Children: table})
	require.NoError(f, err)
	s, err := New(Options{Sandbox: noSandbox{}, Children: table, Freezer: freezer})
	require.NoError(f, err)
	_, handler := s.Handler()
	f.Fuzz(func(t *testing.T, call, form uint8, coding, keepalive string, body []byte) {
		r := httptest.NewRequest(http.MethodPost, "/process.Process/"+calls[int(call)%len(calls)], bytes.NewReader(body))
		r.Header.Set("Content-Type", forms[int(form)%len(forms)])
		r.Header.Set("Content-Encoding", coding)
		r.Header.Set("Connect-Content-Encoding", coding)
		r.Header.Set(keepaliveHeader, keepalive)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		answer, err := io.ReadAll(w.Body)
		require.NoError(t, err)
		require.NotEqual(t, http.StatusInternalServerError, w.Code, "%s", answer)
		if text := string(answer); strings.Contains(text, `"code":"internal"`) {
			require.Regexp(t, `"message":"(protocol error|corrupt response|unmarshal end stream message): `, text,
				"only package connect's, for a bad envelope")
		}
		require.Zero(t, s.Running())
	})
}

// FuzzStart gives any request to what comes before a process is made.
func FuzzStart(f *testing.F) {
	f.Add(`{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{"A":"b","PATH":"x:/bin"},"cwd":"~/a"}}`)
	f.Add(`{"process":{"cmd":"a","envs":{"":""}},"pty":{"size":{"cols":65536,"rows":1}}}`)
	f.Add(`{"process":{"cmd":"a\u0000","cwd":"/proc/self"},"stdin":true,"tag":""}`)
	f.Fuzz(func(t *testing.T, text string) {
		r := &processpb.StartRequest{}
		if protojson.Unmarshal([]byte(text), r) != nil || check(r) != nil {
			return
		}
		account := accounts.Account{Name: "me", Home: "/home/me"}
		config := &initbox.Config{SandboxID: "s"}
		env := environment([]string{"PATH=/bin", "A"}, account, config, r.GetProcess().GetEnvs(), true)
		entries := list(env)
		names := map[string]bool{}
		for _, entry := range entries {
			name, _, ok := strings.Cut(entry, "=")
			require.True(t, ok)
			require.NotEmpty(t, name)
			require.False(t, names[name], "%q is there twice", name)
			require.NotContains(t, entry, "\x00")
			names[name] = true
		}
		require.True(t, slices.IsSorted(entries))
		for name, value := range r.GetProcess().GetEnvs() {
			require.Contains(t, entries, name+"="+value)
		}
		dir, err := directory(r.GetProcess().Cwd, &initbox.Config{}, account)
		if err != nil {
			return
		}
		info, err := os.Stat(dir)
		require.True(t, os.IsPermission(err) || err == nil && info.IsDir(), "%q: %v", dir, err)
		if path, err := lookPath(r.GetProcess().GetCmd(), dir, env["PATH"]); err == nil {
			require.Contains(t, path, "/")
		}
		_, err = size(r.GetPty().GetSize())
		require.NoError(t, err)
	})
}
