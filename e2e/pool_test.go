package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

func (e *env) patchPool(name, patch string) {
	e.t.Helper()
	require.NoError(e.t, e.clients.Berth.Patch(types.MergePatchType).Namespace(namespace).Resource("sandboxpools").Name(name).
		Body([]byte(patch)).Do(e.t.Context()).Error())
}

func TestAPoolFollowsItsSpec(t *testing.T) {
	e := start(t, 2, stack.Options{})
	s := e.claim("pool")
	settled := func(warm int32) func() error {
		return func() error {
			if got := e.pool("pool").Status; got.Warm != warm || got.Pending != 0 || got.Claimed != 1 {
				return fmt.Errorf("not settled: %+v", got)
			}
			return nil
		}
	}
	e.eventually(settled(2))
	e.patchPool("pool", `{"spec":{"warm":4}}`)
	e.eventually(settled(4))
	e.patchPool("pool", `{"spec":{"warm":1}}`)
	e.eventually(settled(1))
	e.eventually(func() error {
		if n := len(e.pods(v1alpha1.LabelPool + "=pool")); n != 2 {
			return fmt.Errorf("%d pods, expected the claimed and a warm one", n)
		}
		return nil
	})

	// Another template replaces the warm pods and leaves the sandbox alone.
	e.patchPool("pool", `{"spec":{"template":{"metadata":{"labels":{"generation":"2"}}}}}`)
	e.eventually(func() error {
		pods := e.pods(v1alpha1.LabelPhase + "=" + v1alpha1.PhaseWarm)
		if len(pods) != 1 || pods[0].Labels["generation"] != "2" {
			return fmt.Errorf("%d warm pods, not all new", len(pods))
		}
		return nil
	})
	e.reaches(e.client(0), s)

	// An empty pool says so, and when to come back.
	e.patchPool("pool", `{"spec":{"warm":0}}`)
	e.eventually(settled(0))
	a := e.api(http.MethodPost, "/sandboxes", `{"templateID":"pool"}`)
	require.Equal(t, http.StatusTooManyRequests, a.code, a.body)
	require.Equal(t, "pool_empty", string(a.refusal(t).Reason))
	require.Equal(t, "1", a.header.Get("Retry-After"))

	// Deleting the pool ends what it holds.
	require.NoError(t, e.clients.Berth.Delete().Namespace(namespace).Resource("sandboxpools").Name("pool").Do(t.Context()).Error())
	e.eventually(func() error {
		err := e.clients.Berth.Get().Namespace(namespace).Resource("sandboxpools").Name("pool").Do(t.Context()).Error()
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return errors.New("the pool is still there")
	})
	require.Empty(t, e.pods(v1alpha1.LabelPool+"=pool"))
	e.gone(e.client(0), s)
	a = e.api(http.MethodPost, "/sandboxes", `{"templateID":"pool"}`)
	require.Equal(t, http.StatusNotFound, a.code, a.body)
	require.Equal(t, "pool_not_found", string(a.refusal(t).Reason))
}

func TestABadPoolIsRefusedByTheNameOfItsField(t *testing.T) {
	e := start(t, 0, stack.Options{})
	for name, c := range map[string]struct {
		change func(*v1alpha1.SandboxPool)
		want   string
	}{
		"negative warm":    {func(p *v1alpha1.SandboxPool) { p.Spec.Warm = -1 }, "spec.warm"},
		"port above 65535": {func(p *v1alpha1.SandboxPool) { p.Spec.DefaultPort = 65536 }, "spec.defaultPort"},
		"fewer pods than warm": {func(p *v1alpha1.SandboxPool) {
			one := int32(1)
			p.Spec.Warm, p.Spec.MaxPods = 2, &one
		}, "spec.maxPods"},
		"host network":  {func(p *v1alpha1.SandboxPool) { p.Spec.Template.Spec.HostNetwork = true }, "hostNetwork"},
		"name too long": {func(p *v1alpha1.SandboxPool) { p.Name = strings.Repeat("x", 41) }, "metadata.name"},
	} {
		t.Run(name, func(t *testing.T) {
			p := stack.DemoPool(namespace, "bad", 1)
			c.change(p)
			err := e.clients.Berth.Post().Namespace(namespace).Resource("sandboxpools").Body(p).Do(t.Context()).Error()
			require.ErrorContains(t, err, c.want)
		})
	}

	// What only the making of a pod can tell stands in a condition.
	p := stack.DemoPool(namespace, "unmakeable", 1)
	p.Spec.Template.Spec.Containers[0].Name = "Not A Name"
	e.createPool(p)
	e.eventually(func() error {
		for _, c := range e.pool("unmakeable").Status.Conditions {
			if c.Type == v1alpha1.PoolPodsCreatable && c.Status == "False" && strings.Contains(c.Message, "spec.containers[0].name") {
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", e.pool("unmakeable").Status.Conditions)
	})
}

func TestBadClaimsAreRefused(t *testing.T) {
	e := start(t, 1, stack.Options{})
	for _, c := range []struct {
		body   string
		code   int
		reason string
		want   string
	}{
		{`{`, 400, "bad_request", "JSON"},
		{`{}`, 400, "bad_request", "templateID"},
		{`{"templateID":"nosuch"}`, 404, "pool_not_found", "nosuch"},
		{`{"templateID":"pool","timeout":0}`, 400, "bad_request", "timeout"},
		{`{"templateID":"pool","metadata":{"a":1}}`, 400, "bad_request", "metadata"},
		{`{"templateID":"pool","envVars":{"A":"b"}}`, 501, "not_implemented", "envVars"},
	} {
		a := e.api(http.MethodPost, "/sandboxes", c.body)
		require.Equal(t, c.code, a.code, "%s: %s", c.body, a.body)
		refusal := a.refusal(t)
		require.Equal(t, c.reason, string(refusal.Reason))
		require.Contains(t, refusal.Message, c.want)
	}
	require.Equal(t, int32(1), e.pool("pool").Status.Warm, "no refused claim took a pod")
}
