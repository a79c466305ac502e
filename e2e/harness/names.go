package harness

import (
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
)

// NameServer starts a name server for the egress gateway at an address of this machine. It ends with the test. At
// returns the IPv4 address of an absolute name in small letters; the zero value: none. Nil: every name is at the
// address of the name server.
func NameServer(t testing.TB, ip netip.Addr, at func(name string) netip.Addr) (addr string) {
	t.Helper()
	if at == nil {
		at = func(string) netip.Addr { return ip }
	}
	c, err := net.ListenPacket("udp", netip.AddrPortFrom(ip, 0).String())
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		buffer := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(buffer)
			if err != nil {
				return
			}
			if raw := answer(buffer[:n], at); raw != nil {
				_, _ = c.WriteTo(raw, from)
			}
		}
	})
	t.Cleanup(func() { _ = c.Close(); serving.Wait() })
	return c.LocalAddr().String()
}

// answer answers one question, nil for what is none.
func answer(question []byte, at func(name string) netip.Addr) []byte {
	var m dnsmessage.Message
	if m.Unpack(question) != nil || len(m.Questions) != 1 {
		return nil
	}
	m.Response, m.Additionals = true, nil
	q := m.Questions[0]
	switch addr := at(q.Name.String()); {
	case !addr.IsValid():
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 1},
			Body:   &dnsmessage.AResource{A: addr.As4()},
		}}
	}
	raw, err := m.Pack()
	if err != nil {
		return nil
	}
	return raw
}
