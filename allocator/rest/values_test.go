package rest

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// withAgent is a control plane with the pool python, whose pods have an agent if enabled.
func withAgent(enabled bool) *fake {
	pool := &v1alpha1.SandboxPool{}
	pool.Name = "python"
	pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: enabled, Port: 49983}
	return &fake{pools: []*v1alpha1.SandboxPool{pool}, claimed: func(s *core.Sandbox) { s.Agent.Port = 49983 }}
}

func TestNamesThatNoProgramCanReadAreRefused(t *testing.T) {
	for _, field := range []string{"envVars", "secrets"} {
		for name, ok := range map[string]bool{"A": true, "_a1": true, "spring.name-x": true, "1A": false, "a b": false, "a$": false, "é": false} {
			f := withAgent(true)
			w := call(handler(t, f), "POST", "/sandboxes", fmt.Sprintf(`{"templateID":"python",%q:{"B":"","%s":"canary"}}`, field, name))
			if ok {
				require.Equal(t, 201, w.Code, w.Body)
				continue
			}
			e := refusal(t, w, 400, apierror.BadRequest)
			require.Contains(t, e.Message, fmt.Sprintf("%s: the name %q must have letters", field, name))
			require.NotContains(t, e.Message, "canary")
			require.Zero(t, f.claims)
		}
	}
}

func TestClaimBringsValuesForTheAgent(t *testing.T) {
	values := `"envVars":{"A":"1"},"secrets":{"KEY":"canary"},"files":[{"path":"/a","content":"text"},` +
		`{"path":"b/c","content":"` + base64.StdEncoding.EncodeToString([]byte{0, 255}) + `","encoding":"base64","mode":"0600"}]`
	want := &agents.Values{
		Envs: map[string]string{"A": "1"}, Secrets: map[string]string{"KEY": "canary"},
		Files: []initbox.File{{Path: "/a", Data: []byte("text")}, {Path: "b/c", Data: []byte{0, 255}, Mode: 0o600}},
	}
	f := withAgent(true)
	require.Equal(t, 201, call(handler(t, f), "POST", "/v2/sandboxes", `{"templateID":"python",`+values+`}`).Code)
	require.Equal(t, want, f.claim.Values)
	w := call(handler(t, f), "POST", "/v1/claims", `{"pool":"python","count":2,`+values+`}`)
	require.Equal(t, 201, w.Code, w.Body)
	require.Equal(t, want, f.claim.Values)
	require.Equal(t, 201, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","envVars":{},"secrets":null}`).Code)
	require.Nil(t, f.claim.Values)
}

// E2B's SDKs start the gateway themselves, with a command.
func TestServersOfAnMCPGatewayAreAccepted(t *testing.T) {
	servers := func(size int) string {
		return `"mcp":{"browserbase":{"apiKey":"` + strings.Repeat("\\n", size) + `"},"x":{}}`
	}
	for at, head := range map[string]string{"/sandboxes": `{"templateID":"python",`, "/v1/claims": `{"pool":"python","count":2,`} {
		f := withAgent(true)
		require.Equal(t, 201, call(handler(t, f), "POST", at, head+servers(1000)+`}`).Code)
		require.Nil(t, f.claim.Values, "the agent gets nothing of it")
		refused := refusal(t, call(handler(t, f), "POST", at, head+servers(33<<10)+`}`), 413, apierror.BodyTooLarge)
		require.Contains(t, refused.Message, "mcp: 676")
		refused = refusal(t, call(handler(t, withAgent(false)), "POST", at, head+servers(1)+`}`), 501, apierror.NotImplemented)
		require.Contains(t, refused.Message, "mcp: the pods of this pool have no agent")
	}
}

func TestHashOfABodyWithSecretsNeedsTheKey(t *testing.T) {
	for _, secret := range []string{`"secrets":{"PIN":"1234"}`, `"mcp":{"x":{"key":"1234"}}`} {
		t.Run(secret, func(t *testing.T) { checkHash(t, `{"templateID":"python",`+secret+`}`) })
	}
}

func checkHash(t *testing.T, body string) {
	hash := func(letter string) [32]byte {
		key, err := sandboxaccess.NewKey([]byte(strings.Repeat(letter, 32)))
		require.NoError(t, err)
		f := withAgent(true)
		h, err := New(Options{
			Allocator: f, AccessKey: key, PublicScheme: "https", PublicHost: "sandbox.example.com", MinIdleTimeout: minIdle, Log: zap.NewNop(),
		})
		require.NoError(t, err)
		require.Equal(t, 201, call(h, "POST", "/sandboxes", body).Code)
		return f.claim.Binding.RequestHash
	}
	require.Equal(t, hash("k"), hash("k"), "every replica finds the same claim")
	require.NotEqual(t, hash("k"), hash("l"))
	require.NotEqual(t, sha256.Sum256([]byte(body)), hash("k"))
}

func TestValuesAreRefusedByNameWithoutTheirText(t *testing.T) {
	many := strings.Repeat("x", initbox.MaxValues/2)
	for body, c := range map[string]struct {
		code int
		says string
	}{
		`"envVars":{"A=canary":"1"}`:                                      {400, `envVars: the name "A=`},
		`"envVars":{"A":"canary\u0000"}`:                                  {400, `envVars: the value of "A"`},
		`"envVars":{"A":{"canary":1}}`:                                    {400, "envVars.A"},
		`"secrets":{"":"canary"}`:                                         {400, "secrets: a name must not be empty"},
		`"secrets":{"A":["canary"]}`:                                      {400, "secrets.A"},
		`"files":[{"path":"/a/","content":"canary"}]`:                     {400, `files[0].path: "/a/" names a directory`},
		`"files":[{"path":"/a","content":"canary!","encoding":"base64"}]`: {400, "files[0].content: not standard base64"},
		`"files":[{"path":"/a","content":"canary","encoding":"gzip"}]`:    {400, "files.0.encoding"},
		`"files":[{"path":"/a","content":"canary","mode":"4755"}]`:        {400, "files.0.mode"},
		`"files":[{"path":"/a","content":"canary","owner":"root"}]`:       {400, "files.0.owner"},
		`"secrets":{"A":"` + many + `","B":"canary` + many + `"}`:         {413, "secrets and files: "},
	} {
		f := withAgent(true)
		w := call(handler(t, f), "POST", "/v2/sandboxes", `{"templateID":"python",`+body+`}`)
		require.Equal(t, c.code, w.Code, "%.80s: %s", body, w.Body)
		require.Contains(t, w.Body.String(), strings.ReplaceAll(c.says, `"`, `\"`))
		if !strings.Contains(c.says, "A=") {
			require.NotContains(t, w.Body.String(), "canary")
		}
		require.Empty(t, f.pool, "a refused request claimed a pod")
	}
	for field, body := range map[string]string{"envVars": `{"A":"1"}`, "secrets": `{"A":"1"}`, "files": `[{"path":"/a","content":""}]`} {
		w := call(handler(t, withAgent(false)), "POST", "/sandboxes", fmt.Sprintf(`{"templateID":"python",%q:%s}`, field, body))
		require.Contains(t, refusal(t, w, 501, apierror.NotImplemented).Message, field+": the pods of this pool have no agent")
	}
}
