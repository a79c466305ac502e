package processnode

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// probe runs a container's readiness probe until the pod is terminal or w.ctx ends.
// It wakes once per period, counted from the pod's start, not the container's.
func (w *worker) probe(c *container) {
	p := prober{spec: c.spec.ReadinessProbe}
	period := time.Duration(p.spec.PeriodSeconds) * time.Second
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		t := c.seen()
		switch p.next(t, time.Now()) {
		case tickQuit:
			return
		case tickProbe:
			if o := p.record(w.probeOnce(c, p.spec)); o != unchanged {
				w.post(func() { w.probed(c, t.id, o) })
			}
		}
		select {
		case <-ticker.C:
		case <-c.trigger:
			ticker.Reset(period)
		case <-w.ctx.Done():
			return
		}
	}
}

// probeOnce probes the container once. The outcome is unknown only if the probe
// could not be made at all.
func (w *worker) probeOnce(c *container, p *corev1.Probe) outcome {
	ctx, cancel := context.WithTimeout(w.ctx, time.Duration(p.TimeoutSeconds)*time.Second)
	defer cancel()
	err := w.httpGet(ctx, c.spec, p.HTTPGet)
	switch {
	case w.ctx.Err() != nil, errors.Is(err, errPort):
		return unknown
	case err != nil:
		return failure
	}
	return success
}

var errPort = errors.New("no such port in the container")

// port returns the port of a probe, which names it by number or by its name in the container.
func port(c *corev1.Container, p intstr.IntOrString) (string, error) {
	if p.Type == intstr.Int {
		return strconv.Itoa(p.IntValue()), nil
	}
	for _, cp := range c.Ports {
		if cp.Name == p.StrVal {
			return strconv.Itoa(int(cp.ContainerPort)), nil
		}
	}
	if n, err := strconv.Atoi(p.StrVal); err == nil {
		return strconv.Itoa(n), nil
	}
	return "", fmt.Errorf("%w: %q", errPort, p.StrVal)
}

// httpGet sends a GET request as a kubelet does: on a connection of its own, without
// checking certificates, following redirects on the same host only. A status from
// 200 to 399 is success.
func (w *worker) httpGet(ctx context.Context, c *corev1.Container, a *corev1.HTTPGetAction) error {
	p, err := port(c, a.Port)
	if err != nil {
		return err
	}
	host := a.Host
	if host == "" {
		host = w.address.String()
	}
	u, err := url.Parse(a.Path)
	if err != nil {
		u = &url.URL{Path: a.Path}
	}
	u.Scheme, u.Host = strings.ToLower(string(a.Scheme)), net.JoinHostPort(host, p)
	if u.Scheme == "" {
		u.Scheme = "http"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "kube-probe/1.36")
	req.Header.Set("Accept", "*/*")
	for _, h := range a.HTTPHeaders {
		if http.CanonicalHeaderKey(h.Name) == "Host" {
			req.Host = h.Value
		} else {
			req.Header.Add(h.Name, h.Value)
		}
	}
	client := http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
		CheckRedirect: func(next *http.Request, via []*http.Request) error {
			if next.URL.Hostname() != via[0].URL.Hostname() || len(via) >= 10 {
				return http.ErrUseLastResponse
			}
			return nil
		},
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 10<<10)) // a kubelet reads no more
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return fmt.Errorf("HTTP probe failed with statuscode: %d", resp.StatusCode)
	}
	return nil
}
