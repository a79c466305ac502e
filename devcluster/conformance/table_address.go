package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func addressTable() []behaviour {
	probe := get("/healthz", 3)
	return []behaviour{
		{name: "every pod has its own address", pod: podSpec{readiness: probe}, judge: func(s *subject) {
			others := []*subject{s, s.create(s.spec), s.create(s.spec), s.create(s.spec)}
			owner := map[string]string{}
			for _, o := range others {
				pod := o.until("ready", ready)
				require.Empty(s.t, owner[pod.Status.PodIP], "address %s has two pods", pod.Status.PodIP)
				owner[pod.Status.PodIP] = pod.Name
			}
		}},
		{name: "an address is reused only after the old containers",
			pod: podSpec{readiness: probe, args: []string{"--term-delay", "4s"}}, judge: func(s *subject) {
				old := s.until("ready", ready)
				s.delete(nil)
				s.until("deleting", deleting)
				quick := podSpec{readiness: probe}
				var later []*corev1.Pod
				for range 3 { // some while the old pod still runs
					later = append(later, s.create(quick).until("ready", ready))
				}
				end := mainOf(observation{pod: s.until("gone", gone)}).State.Terminated
				later = append(later, s.create(quick).until("ready", ready)) // and one after it
				for _, pod := range later {
					began := mainOf(observation{pod: pod}).State.Running.StartedAt
					require.False(s.t, pod.Status.PodIP == old.Status.PodIP && began.Before(&end.FinishedAt),
						"%s had the address %s from %v on, and its last pod ran until %v", pod.Name, old.Status.PodIP, began,
						end.FinishedAt)
				}
			}},
		{name: "the process knows its pod", pod: podSpec{readiness: probe}, dials: true, judge: func(s *subject) {
			pod := s.until("ready", ready)
			var who struct {
				Pod, PodUID, Namespace, IP, Path string
				Port                             int
			}
			require.NoError(s.t, s.do(http.MethodGet, pod.Status.PodIP, mainPort, "/some/path?q=1", &who))
			require.Equal(s.t, s.name, who.Pod)
			require.Equal(s.t, string(pod.UID), who.PodUID)
			require.Equal(s.t, pod.Status.PodIP, who.IP)
			require.Equal(s.t, mainPort, who.Port)
			require.Equal(s.t, "/some/path?q=1", who.Path)
			require.Equal(s.t, s.name+"!$(POD_NAME)$(NOBODY)", who.Namespace, "$(VAR) expansion")
		}},
		{name: "a child process ends with its pod", dials: true, pod: podSpec{readiness: probe, grace: 5,
			args: []string{"--spawn-child", fmt.Sprint(childPort)}}, judge: func(s *subject) {
			pod := s.until("ready", ready)
			s.reachable(pod.Status.PodIP, childPort, true)
			s.delete(nil)
			s.until("gone", gone)
			s.reachable(pod.Status.PodIP, childPort, false)
		}},
		{name: "forced deletion ends the processes", dials: true, pod: podSpec{readiness: probe,
			args: []string{"--ignore-sigterm", "--spawn-child", fmt.Sprint(childPort + 1)}}, judge: func(s *subject) {
			pod := s.until("ready", ready)
			s.reachable(pod.Status.PodIP, forcedChildPort, true)
			s.delete(new(int64))
			s.until("gone", gone)
			s.reachable(pod.Status.PodIP, forcedChildPort, false)
		}},
	}
}

// reachable waits until a port of an address answers, or does not answer. A missing
// answer counts only if another pod still answers.
func (s *subject) reachable(ip string, port int, want bool) {
	s.t.Helper()
	answers := func(ip string, port int) bool { return s.do(http.MethodGet, ip, port, "/", nil) == nil }
	require.Eventually(s.t, func() bool { return answers(ip, port) == want }, s.o.Guard, 50*time.Millisecond,
		"%s:%d answers: expected %v", ip, port, want)
	if !want {
		witness := s.create(podSpec{readiness: get("/healthz", 3)})
		require.True(s.t, answers(witness.until("ready", ready).Status.PodIP, mainPort), "no pod can be reached any more")
	}
}

// serves requires that the pod answers every request, one per period, until end.
func (s *subject) serves(pod *corev1.Pod, period time.Duration, end time.Time) {
	s.t.Helper()
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for now := time.Now(); ; now = <-ticker.C {
		var who struct{ PodUID string }
		require.NoError(s.t, s.do(http.MethodGet, pod.Status.PodIP, mainPort, "/", &who))
		require.Equal(s.t, string(pod.UID), who.PodUID)
		if now.After(end) {
			return
		}
	}
}

// do sends a request over Options.Dial and decodes the answer into into, unless that
// is nil.
func (s *subject) do(method, ip string, port int, path string, into any) error {
	ctx, cancel := s.limit()
	defer cancel()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return s.o.Dial(ctx, ip, port) }}}
	req, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("http://%s:%d%s", ip, port, path), nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%s %s answers %s", method, path, resp.Status)
	case into == nil:
		return nil
	}
	return json.Unmarshal(body, into)
}
