package processnode

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// probe runs the readiness probe of one run of the container, once per period, until
// the run or the pod's worker ends.
func (w *worker) probe(r *run) {
	spec := w.spec.ReadinessProbe
	url := "http://" + net.JoinHostPort(w.address.String(), spec.HTTPGet.Port.String()) + spec.HTTPGet.Path
	tick := time.NewTicker(time.Duration(spec.PeriodSeconds) * time.Second)
	defer tick.Stop()
	var v verdict
	for {
		if int32(time.Since(r.startedAt).Seconds()) >= spec.InitialDelaySeconds {
			ready := v.record(spec, w.httpGet(url, time.Duration(spec.TimeoutSeconds)*time.Second) == nil)
			w.post(func() { r.passed = ready })
		}
		select {
		case <-tick.C:
		case <-r.proc.Done():
			return
		case <-w.ctx.Done():
			return
		}
	}
}

// verdict counts equal results of a probe (pkg/kubelet/prober/worker.go).
type verdict struct {
	ready bool  // the verdict: false until the probe has succeeded often enough
	last  bool  // the last result
	same  int32 // how often last came in a row
}

// record takes a result and returns the verdict.
func (v *verdict) record(p *corev1.Probe, succeeded bool) (ready bool) {
	if v.last == succeeded {
		v.same++
	} else {
		v.last, v.same = succeeded, 1
	}
	threshold := p.FailureThreshold
	if succeeded {
		threshold = p.SuccessThreshold
	}
	if v.same >= threshold {
		v.ready = succeeded
	}
	return v.ready
}

// httpGet sends a GET request as a kubelet does, on a connection of its own. A status
// from 200 to 399 is success.
func (w *worker) httpGet(url string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(w.ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "kube-probe/1.36")
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return fmt.Errorf("readiness probe answers %s", resp.Status)
	}
	return nil
}
