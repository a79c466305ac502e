package kube_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// answers is an API server that gives these answers, one after the other.
type answers struct {
	bodies []string // "" breaks the connection
	asked  []string // continue tokens
}

func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	a.asked = append(a.asked, r.URL.Query().Get("continue"))
	body := a.bodies[0]
	a.bodies = a.bodies[1:]
	if body == "" {
		return nil, errors.New("no connection")
	}
	code := http.StatusOK
	if strings.Contains(body, "Expired") {
		code = http.StatusGone
	}
	header := http.Header{"Content-Type": {"application/json"}}
	return &http.Response{StatusCode: code, Header: header, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

func page(next, version string, names ...string) string {
	items := make([]string, len(names))
	for i, name := range names {
		items[i] = `{"metadata":{"name":"` + name + `"}}`
	}
	return `{"apiVersion":"berth.sh/v1alpha1","kind":"SandboxPoolList","metadata":{"continue":"` + next +
		`","resourceVersion":"` + version + `"},"items":[` + strings.Join(items, ",") + `]}`
}

// A mixture of two lists would hold objects that are gone, and some objects twice.
func TestListStartsAgainWhenItsSnapshotExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &answers{bodies: []string{
			page("1", "7", "gone", "a"), "", page("2", "7", "b"),
			`{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Expired","code":410}`,
			page("3", "9", "a", "b"), page("", "9", "c"),
		}}
		clients, err := kube.NewClients(&rest.Config{Host: "http://api", Transport: api}, 0, 0)
		require.NoError(t, err)
		log, failed := observer.New(zap.WarnLevel)
		r := kube.Resource{Client: clients.Berth, Name: "sandboxpools", Namespace: "default"}
		all, version, err := kube.List(t.Context(), r, zap.New(log), func(l *v1alpha1.SandboxPoolList) (names []string) {
			for i := range l.Items {
				names = append(names, l.Items[i].Name)
			}
			return names
		})
		require.NoError(t, err)
		require.Equal(t, []string{"a", "b", "c"}, all)
		require.Equal(t, "9", version)
		require.Equal(t, []string{"", "1", "1", "2", "", "3"}, api.asked)
		require.Equal(t, 2, failed.Len())
	})
}
