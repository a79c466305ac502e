package egress

import (
	"net/netip"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/egress/policy"
)

func TestAnswerAsksForTLSOnlyWithHeaders(t *testing.T) {
	r := &request{
		id: "abc", incarnation: 7,
		dest: policy.Dest{Host: "example.com", Port: 443}, addr: netip.MustParseAddr("2001:db8::1"),
	}
	for _, headers := range [][]Header{nil, {{Name: "authorization", Value: "v"}}} {
		r.headers = headers
		d := decision{admitted: r}
		answer, err := d.answer()
		require.NoError(t, err)
		var m extprocv3.ProcessingResponse
		require.NoError(t, proto.Unmarshal(answer, &m))
		fields := map[string]any{"dst": "[2001:0db8:0000:0000:0000:0000:0000:0001]:443", "id": "abc", "incarnation": "7"}
		if headers != nil {
			fields["tls"] = "yes"
		}
		require.Equal(t, map[string]any{"berth": fields}, m.GetDynamicMetadata().AsMap())
		require.Equal(t, headers != nil, m.GetRequestHeaders().GetResponse().GetClearRouteCache())
		set := map[string]string{}
		for _, h := range m.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
			set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
		}
		want := map[string]string{}
		if headers != nil {
			want = map[string]string{":authority": "example.com", "authorization": "v"}
		}
		require.Equal(t, want, set)
	}
}

// Programs write http for a host that is asked over TLS.
func TestPlainRequestWithHeadersGoesToPort443(t *testing.T) {
	e := &entry{Sandbox: Sandbox{Headers: []Header{{Host: "a.example", Port: 443}, {Host: "b.example", Port: 8443}}}}
	for _, c := range []struct {
		method, host string
		port, want   uint16
		needs        bool
	}{
		{"GET", "a.example", 80, 443, true}, {"GET", "a.example", 443, 443, true}, {"GET", "a.example", 8443, 8443, false},
		{"CONNECT", "a.example", 443, 443, false}, {"CONNECT", "a.example", 80, 80, false},
		{"GET", "b.example", 80, 80, false}, {"GET", "b.example", 8443, 8443, true}, {"GET", "c.example", 80, 80, false},
	} {
		to, needs := e.withHeaders(&question{method: c.method}, policy.Dest{Host: c.host, Port: c.port})
		require.Equal(t, policy.Dest{Host: c.host, Port: c.want}, to, c)
		require.Equal(t, c.needs, needs, c)
	}
}
