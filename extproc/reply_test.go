package extproc

import (
	"encoding/json"
	"net/netip"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/apierror"
)

// admitted is the answer that lets a request through.
func admitted(tb testing.TB, a *decision) *extprocv3.ProcessingResponse {
	tb.Helper()
	return decoded(tb, a.appendAnswer(nil))
}

func headersSet(r *extprocv3.ImmediateResponse) map[string]string {
	headers := map[string]string{}
	for _, h := range r.GetHeaders().GetSetHeaders() {
		headers[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	return headers
}

func TestRefusalIsTheDocumentedJSON(t *testing.T) {
	e := apierror.New(apierror.RouterNotReady, `say "please"`)
	e.SandboxID, e.RequestID = "abc", "req\xff-1"
	reply := refused(e, program, false).GetImmediateResponse()
	var body map[string]any
	require.NoError(t, json.Unmarshal(reply.GetBody(), &body))
	require.Equal(t, map[string]any{
		"code": 503.0, "reason": "router_not_ready", "message": `say "please"`, "sandboxID": "abc", "requestID": "req\ufffd-1",
	}, body)
	require.Equal(t, map[string]string{
		"content-type": "application/json", "x-berth-reason": "router_not_ready", "retry-after": "1", "cache-control": "no-store", "x-content-type-options": "nosniff",
	}, headersSet(reply))
}

func TestRefusalHasTheFormOfItsClient(t *testing.T) {
	refusal := func(reason apierror.Reason) *apierror.Error {
		e := apierror.New(reason, "<b>&</b>")
		e.SandboxID, e.RequestID = "abc", "r"
		return e
	}
	answer := func(reason apierror.Reason, to client) (*extprocv3.ImmediateResponse, apierror.Error) {
		var e apierror.Error
		r := refused(refusal(reason), to, false).GetImmediateResponse()
		_ = json.Unmarshal(r.GetBody(), &e)
		return r, e
	}
	for _, k := range apierror.Kinds() {
		r, e := answer(k.Reason, program)
		require.EqualValues(t, k.Code, r.GetStatus().GetCode())
		require.Equal(t, k.Code, e.Code)

		r, e = answer(k.Reason, e2bSDK)
		require.EqualValues(t, e.Code, r.GetStatus().GetCode())
		require.Equal(t, string(k.Reason), headersSet(r)["x-berth-reason"])
		switch k.Reason {
		case apierror.SandboxNotFound, apierror.SandboxGone, apierror.SandboxAsleep:
			require.Equal(t, 502, e.Code)
			require.Contains(t, e.Message, "was not found")
		case apierror.PortPrivate:
			require.Equal(t, 502, e.Code)
			require.Contains(t, e.Message, "port is not open")
		default:
			require.Equal(t, k.Code, e.Code)
			require.Equal(t, k.Reason, e.Reason)
			require.Equal(t, "abc", e.SandboxID)
		}

		r, _ = answer(k.Reason, grpcClient)
		require.Equal(t, "<b>&</b>", string(r.GetBody()), "becomes grpc-message")
		require.Equal(t, uint32(k.GRPC), r.GetGrpcStatus().GetStatus())
		require.NotEqual(t, uint32(codes.OK), r.GetGrpcStatus().GetStatus())
		require.NotContains(t, headersSet(r), "content-type")

		r, _ = answer(k.Reason, browser)
		require.EqualValues(t, k.Code, r.GetStatus().GetCode())
		require.Equal(t, "text/html; charset=utf-8", headersSet(r)["content-type"])
		require.Equal(t, apierror.PageCSP, headersSet(r)["content-security-policy"])
		require.Contains(t, string(r.GetBody()), "&lt;b&gt;&amp;&lt;/b&gt;", "a client's bytes are no markup")
		require.Contains(t, string(r.GetBody()), "sandbox abc")
	}
}

// The facts of E2B's own proxy: 502 and these bodies, whatever the client is.
func TestE2BStatusesAreThoseOfE2B(t *testing.T) {
	for reason, message := range map[apierror.Reason]string{
		apierror.SandboxNotFound: "The sandbox was not found", apierror.SandboxGone: "The sandbox was not found",
		apierror.PortPrivate: "The sandbox is running but port is not open",
	} {
		e := apierror.New(reason, "of Berth")
		e.SandboxID, e.RequestID = "abc", "r"
		want := `{"sandboxId":"abc","message":"` + message + `","code":502}`
		for _, to := range []client{program, e2bSDK} {
			r := refused(e, to, true).GetImmediateResponse()
			require.EqualValues(t, 502, r.GetStatus().GetCode())
			require.Equal(t, want, string(r.GetBody()))
			require.Equal(t, "application/json", headersSet(r)["content-type"])
		}
		require.Equal(t, want, string(refused(e, e2bSDK, false).GetImmediateResponse().GetBody()))

		r := refused(e, browser, true).GetImmediateResponse()
		require.EqualValues(t, 502, r.GetStatus().GetCode())
		require.Contains(t, string(r.GetBody()), "<!doctype html>")
		require.Contains(t, string(r.GetBody()), "Of Berth.", "people read Berth's message")

		r = refused(e, grpcClient, true).GetImmediateResponse()
		require.Equal(t, uint32(apierror.KindOf(reason).GRPC), r.GetGrpcStatus().GetStatus())
		require.Equal(t, "of Berth", string(r.GetBody()))
	}
	r := refused(apierror.New(apierror.SandboxStarting, "m"), program, true).GetImmediateResponse()
	require.EqualValues(t, 503, r.GetStatus().GetCode(), "E2B has no such answer")
}

func TestBareDomainHasPageForPeople(t *testing.T) {
	h := Hosts{Domain: domain}
	_, e := h.target(&request{authority: []byte(domain + ":8443")})
	require.Equal(t, apierror.NotFound, e.Reason)
	require.Contains(t, e.Message, "<port>-<sandbox id>."+domain)
	require.Contains(t, e.Message, "api."+domain)
	require.EqualValues(t, 404, refused(e, program, false).GetImmediateResponse().GetStatus().GetCode())
	r := refused(e, browser, false).GetImmediateResponse()
	require.EqualValues(t, 200, r.GetStatus().GetCode())
	require.Equal(t, apierror.Home(domain), r.GetBody())
	require.Equal(t, apierror.PageCSP, headersSet(r)["content-security-policy"])
}

func TestClientKinds(t *testing.T) {
	for name, c := range map[string]struct {
		r    request
		want client
	}{
		"nothing said":                {request{}, program},
		"curl":                        {request{html: false}, program},
		"a browser navigates":         {request{html: true, fetchMode: []byte("navigate")}, browser},
		"an old browser":              {request{html: true}, browser},
		"a script of a page":          {request{html: true, fetchMode: []byte("cors")}, program},
		"a WebSocket":                 {request{html: true, fetchMode: []byte("websocket")}, program},
		"navigates, but not to pages": {request{html: false, fetchMode: []byte("navigate")}, program},
		"gRPC":                        {request{contentType: []byte("application/grpc")}, grpcClient},
		"gRPC with a codec":           {request{contentType: []byte("application/grpc+proto"), html: true, e2bID: one("abc")}, grpcClient},
		"gRPC-Web":                    {request{contentType: []byte("application/grpc-web")}, program},
		"an E2B SDK":                  {request{e2bID: one("abc"), html: true, fetchMode: []byte("navigate")}, e2bSDK},
		"the other headers":           {request{id: one("abc")}, program},
	} {
		require.Equal(t, c.want, c.r.client(), name)
	}
}

func TestOnlyAPathThatNamedTheSandboxIsChanged(t *testing.T) {
	dst := netip.MustParseAddrPort("10.1.2.3:80")
	require.Empty(t, admitted(t, &decision{id: key("abc"), dst: dst}).GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders())
	set := admitted(t, &decision{id: key("abc"), dst: dst, path: "/x?y"}).GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders()
	require.Len(t, set, 1)
	require.Equal(t, ":path", set[0].GetHeader().GetKey())
	require.Equal(t, "/x?y", string(set[0].GetHeader().GetRawValue()))
}
