package envoy

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"time"
)

const (
	// drainPage and resumePage are the pages of Envoy's admin interface that change something.
	drainPage, resumePage = "/healthcheck/fail", "/healthcheck/ok"
	// adminTimeout bounds a call of these pages.
	adminTimeout = 5 * time.Second
)

// AdminClient returns a client that speaks HTTP over Envoy's admin socket. The host of a URL does not matter.
func AdminClient(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
}

// Drain begins the planned end of an Envoy, and returns at once. The page /ready fails, which tells load balancers.
// With each answer the client learns to open another connection for the next request: by Connection: close, or
// GOAWAY. Envoy serves as before, new connections too, until its process ends. Before that it should have the time
// in which load balancers notice and requests in progress end.
func Drain(ctx context.Context, admin *http.Client) error { return post(ctx, admin, drainPage) }

// Resume undoes Drain.
func Resume(ctx context.Context, admin *http.Client) error { return post(ctx, admin, resumePage) }

func post(ctx context.Context, admin *http.Client, page string) error {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://envoy"+page, http.NoBody)
	if err != nil {
		return err
	}
	response, err := admin.Do(r)
	if err != nil {
		return fmt.Errorf("admin socket of Envoy: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotFound { // the Envoy of another gateway, see OtherGateway
		return fmt.Errorf("admin socket of Envoy: %s: %w", page, fs.ErrNotExist)
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("admin socket of Envoy: %s: status %d", page, response.StatusCode)
	}
	return nil
}
