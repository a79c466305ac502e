package egress

import (
	"net/netip"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/egress/policy"
)

func TestAnswerAsksForTLSOnlyIfDecided(t *testing.T) {
	r := &request{
		id: "abc", incarnation: 7,
		dest: policy.Dest{Host: "example.com", Port: 443}, addr: netip.MustParseAddr("2001:db8::1"),
	}
	for _, tls := range []bool{false, true} {
		d := decision{admitted: r, tls: tls}
		var m extprocv3.ProcessingResponse
		require.NoError(t, proto.Unmarshal(d.answer(), &m))
		fields := map[string]any{"dst": "[2001:0db8:0000:0000:0000:0000:0000:0001]:443", "id": "abc", "incarnation": "7"}
		if tls {
			fields["tls"] = "yes"
		}
		require.Equal(t, map[string]any{"berth": fields}, m.GetDynamicMetadata().AsMap())
		require.Equal(t, tls, m.GetRequestHeaders().GetResponse().GetClearRouteCache())
		require.Empty(t, m.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders())
	}
}
