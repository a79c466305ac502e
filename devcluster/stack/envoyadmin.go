package stack

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// EnvoyAdmin returns a client that speaks HTTP over Envoy's admin socket,
// whatever the host of a URL.
func EnvoyAdmin(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
}

// EnvoyAddress asks Envoy, through a client from EnvoyAdmin, which address its
// only listener got.
func EnvoyAddress(ctx context.Context, admin *http.Client) (netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envoy/listeners?format=json", http.NoBody)
	if err != nil {
		return netip.AddrPort{}, err
	}
	response, err := admin.Do(r)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer response.Body.Close()
	var listeners struct {
		Statuses []struct {
			Address struct {
				Socket struct {
					Address string `json:"address"`
					Port    uint16 `json:"port_value"`
				} `json:"socket_address"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	if err := json.NewDecoder(response.Body).Decode(&listeners); err != nil {
		return netip.AddrPort{}, err
	}
	if len(listeners.Statuses) != 1 {
		return netip.AddrPort{}, fmt.Errorf("%d listeners, expected one", len(listeners.Statuses))
	}
	socket := listeners.Statuses[0].Address.Socket
	ip, err := netip.ParseAddr(socket.Address)
	return netip.AddrPortFrom(ip, socket.Port), err
}
