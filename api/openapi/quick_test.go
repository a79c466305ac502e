package openapi

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// values are at both sides of the bounds of the document, and of each type.
var values = []any{
	nil, true, false, "", "public", "Bytes", "Zebra", strings.Repeat("é", 253), strings.Repeat("é", 254), strings.Repeat("x", 256),
	strings.Repeat("x", 257), json.Number("0"), json.Number("-1"), json.Number("1"), json.Number("300"), json.Number("301"),
	json.Number("31536000"), json.Number("31536001"), json.Number("5.0"), json.Number("5e0"), json.Number("9223372036854775808"), json.Number("0.5"),
	[]any{}, []any{"a"}, []any{json.Number("443")}, []any{json.Number("65536")}, slices.Repeat([]any{json.Number("1")}, 65),
	map[string]any{}, map[string]any{"a": "b"}, map[string]any{"enabled": true}, map[string]any{"a": json.Number("1")},
	map[string]any{"httpsPorts": []any{json.Number("443")}}, map[string]any{"httpsPorts": []any{""}},
}

func TestQuickAcceptsOnlyWhatTheValidatorAccepts(t *testing.T) {
	document, err := Load()
	require.NoError(t, err)
	seen := 0
	for _, o := range document.Operations {
		if o.Body == nil {
			continue
		}
		seen++
		schema := o.Body.compiled
		for schema.Ref != nil {
			schema = schema.Ref
		}
		names := []string{"other"}
		for name := range schema.Properties {
			names = append(names, name)
		}
		slices.Sort(names)
		rapid.Check(t, func(t *rapid.T) {
			body := rapid.MapOfN(rapid.SampledFrom(names), rapid.SampledFrom(values), 0, 4).Draw(t, "body")
			for _, name := range schema.Required { // else few bodies are valid
				if _, has := body[name]; !has && rapid.IntRange(0, 9).Draw(t, "missing") > 0 {
					body[name] = rapid.SampledFrom([]any{"a", json.Number("1")}).Draw(t, name)
				}
			}
			if p := o.Body.problem("body", body); o.Body.quick.accepts(body) && p != nil {
				t.Fatalf("%s: %v", o.ID, p)
			}
		})
	}
	require.Greater(t, seen, 5)
}

// Bodies as clients send them cost no more than their decoding.
func TestUsualBodiesNeedNoValidator(t *testing.T) {
	for id, bodies := range map[string][]string{
		"createSandbox": {
			`{"templateID":"a"}`, `{"templateID":"a","timeout":300,"metadata":{"k":"v"},"envVars":{},"secure":true,"allow_internet_access":true,"autoPause":false}`,
			`{"templateID":"a","idleTimeout":null,"waitTimeout":0,"user":"ada","access":"token","activity":"Bytes","minBytesPerMinute":7}`,
			`{"templateID":"a","network":{"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}","httpsPorts":[443]}}`,
		},
		"claimBatch": {`{"pool":"a","count":100,"atLeast":1,"metadata":{"k":"v"}}`},
		"setTimeout": {`{"timeout":60}`}, "connectSandbox": {`{"timeout":60}`},
	} {
		for _, body := range bodies {
			value, err := jsonschema.UnmarshalJSON(bytes.NewReader([]byte(body)))
			require.NoError(t, err)
			require.True(t, operationOf(t, id).Body.quick.accepts(value), "%s %s", id, body)
		}
	}
}
