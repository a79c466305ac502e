package envoy

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func egressDefaults() EgressSettings {
	return EgressSettings{
		Listen: netip.MustParseAddrPort("[::]:3128"), HealthListen: netip.MustParseAddrPort("0.0.0.0:8082"),
		RouterSocket: "/run/berth/egress.sock", AdminSocket: "/run/berth/envoy-admin.sock",
		CAFile: "/etc/ssl/certs/ca-certificates.crt", MaxHeap: 1 << 30,
	}
}

func TestInvalidSettingsOfEgressAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*EgressSettings)
		want   string
	}{
		"no listen address":      {func(s *EgressSettings) { s.Listen = netip.AddrPort{} }, "listen address"},
		"no router socket":       {func(s *EgressSettings) { s.RouterSocket = "" }, "router socket"},
		"relative admin socket":  {func(s *EgressSettings) { s.AdminSocket = "a" }, "admin socket"},
		"no authorities":         {func(s *EgressSettings) { s.CAFile = "" }, "authorities file"},
		"too little memory":      {func(s *EgressSettings) { s.MaxHeap = 1 }, "max heap 1"},
		"health at the listener": {func(s *EgressSettings) { s.HealthListen = s.Listen }, "health listen address"},
	} {
		t.Run(name, func(t *testing.T) {
			s := egressDefaults()
			c.change(&s)
			_, err := EgressBootstrap(s)
			require.ErrorContains(t, err, c.want)
		})
	}
}
