package openapi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestX(t *testing.T) {
	d, err := Load()
	require.NoError(t, err)
	for _, o := range d.Operations {
		t.Log(o.Method, o.Paths, o.ID, o.Refused, len(o.Query), o.Body != nil)
		if o.ID == "createSandbox" {
			for _, b := range []string{`{}`, `[]`, `null`, `{"templateID":5}`, `{"templateID":"a","timeout":"5m"}`, `{"template":"x"}`, `{"temlateID":"x"}`, `{"templateID":"a","zzz":3}`, `{"templateID":"a","secure":true,"envVars":{},"allow_internet_access":true}`,
				`{"templateID":"a","envVars":{"a":"b"}}`, `{"templateID":"a","network":{"allowPublicTraffic":false}}`, `{"templateID":"a","network":{"allowPublicTrafic":false}}`, `{"templateID":"a","autoResume":{"enabled":true}}`, `{"templateID":"a","timeout":0}`, `{"templateID":"a","metadata":{"x":5}}`, `{"templateID":"a","activity":"x"}`, `{"templateID":"a","timeout":3.5}`, `{"templateID":"a"} x`, `{"templateID":"a","allow_internet_access":false}`} {
				t.Log(b, " -> ", o.Body.Check([]byte(b)))
			}
		}
		if o.ID == "listSandboxes" {
			for _, q := range []map[string][]string{{"limit": {"0"}}, {"limit": {"x"}}, {"state": {"running,paused"}}, {"state": {"x"}}, {"startedAfter": {"yesterday"}}, {"startedAfter": {"2026-01-01T00:00:00.123Z"}}, {"foo": {"1"}}, {"order": {"desc", "asc"}}} {
				t.Log(q, " -> ", o.CheckQuery(q))
			}
		}
	}
}
