package support

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const key = "e2b_0123456789abcdef0123456789abcdef01234567"

func TestShapesOfSecretsAreRemovedFromText(t *testing.T) {
	token := strings.Repeat("0a1b2c3d", 8)
	r := newRedactor("the value of a Secret\n", "short")
	for text, want := range map[string]string{
		"called with " + key:                             "called with [removed]",
		`{"key":"` + key + `"}`:                          `{"key":"[removed]"}`,
		"Authorization: Bearer abcdefgh.123":             "Authorization: [removed] [removed]",
		"GET /?a=1&token=abcd&b=2":                       "GET /?a=1&token=[removed]&b=2",
		`"X-Access-Token": "abc"`:                        `"X-Access-Token": "[removed]"`,
		`\"password\":\"abc\"`:                           `\"password\":\"[removed]\"`,
		"token " + token:                                 "token [removed]",
		"image x@sha256:" + token:                        "image x@sha256:" + token,
		"containerd://" + token:                          "containerd://" + token,
		"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln":      "[removed]",
		"the value of a Secret is":                       "[removed] is",
		"dGhlIHZhbHVlIG9mIGEgU2VjcmV0Cg==":               "[removed]",
		"sandbox k3x9k3x9k3x9k3x9k3x9, released":         "sandbox k3x9k..., released",
		"'x-pool-key', 'can ary'\n':path', '/a'\n":       "'x-pool-key', '[removed]'\n':path', '/a'\n",
		"2026-11-28T03:34:07.7Z 'x-pool-key', 'can ary'": "2026-11-28T03:34:07.7Z 'x-pool-key', '[removed]'",
		"headers: 'Cookie', 'a=can ary; b=canary'":       "headers: 'Cookie', '[removed]'",
		"':path', '/?token=canary'":                      "':path', '/?token=[removed]'",
		"a short line stays as it is":                    "a short line stays as it is",
		"-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\nrest": "[removed]\nrest",
		"-----BEGIN PRIVATE KEY-----\nMHc cut off":                                "[removed]",
	} {
		require.Equal(t, want, string(r.text([]byte(text))))
	}
}

func TestFieldsOfObjectsAreRemovedByTheirPlace(t *testing.T) {
	const word = "canary"
	clean, err := newRedactor().object([]byte(`{"items": [
		{"metadata": {"name": "pod", "uid": "1", "managedFields": [{"f": "canary"}],
		  "labels": {"app.kubernetes.io/name": "berth"}, "annotations": {"berth.sh/x": "stays", "mine": "canary",
		  "kubectl.kubernetes.io/last-applied-configuration": "canary"}},
		 "spec": {"containers": [{"name": "c", "args": ["--flag=stays"], "env": [{"name": "A", "value": "canary"}]}]}},
		{"metadata": {"name": "sandbox", "uid": "2"}, "spec": {"metadata": {"task": "canary"}, "user": "stays",
		  "template": {"metadata": {"labels": {"l": "stays"}, "annotations": {"a": "canary"}}, "spec": {"containers": [
		    {"command": ["canary"], "args": ["canary"], 
		     "env": [{"name": "B", "valueFrom": {"secretKeyRef": {"name": "stays"}}}]}]}}}},
		{"status": {"logLines": ["canary"],
		  "containerStatuses": [{"state": {"terminated": {"reason": "stays", "message": "canary"}}}]}},
		{"envs": {"A": "canary"}, "token": "canary", "data": {"k": "canary"}, "count": 12345678901234567}]}`))
	require.NoError(t, err)
	require.NotContains(t, string(clean), word)
	require.Equal(t, 6, strings.Count(string(clean), "stays"))
	require.Contains(t, string(clean), "12345678901234567")

	_, err = newRedactor().object([]byte(`{"cut": "off`))
	require.Error(t, err, "what cannot be read cannot be cleaned")
}
