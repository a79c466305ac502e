package main

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/allocator/access"
)

// testKeys makes keys on an API server, and watches them as an allocator does.
func testKeys(t *testing.T, client kubernetes.Interface, kubeconfig string) {
	keys := func(args ...string) (stdout, stderr string, err error) {
		return command(t.Context(), append(append([]string{"keys"}, args...), "--kubeconfig="+kubeconfig, "--namespace=default")...)
	}
	watched, err := access.NewKeys(access.Options{Client: client, Namespace: "default", Log: zap.NewNop()})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { watched.Run(ctx) })
	defer running.Wait()
	defer stop()
	eventually := func(key string, want error) (c access.Caller) {
		require.Eventually(t, func() (ok bool) {
			var err error
			c, err = watched.Caller(key)
			return err == want //nolint:errorlint // nil or the error itself
		}, time.Minute, time.Millisecond)
		return c
	}

	stdout, stderr, err := keys("create", "--name=ci", "--team=search")
	require.NoError(t, err)
	require.Contains(t, stderr, "key ci of team search, role member")
	key := strings.TrimSuffix(stdout, "\n")
	require.Equal(t, access.Caller{Key: "ci", Team: "search", Role: access.Member}, eventually(key, nil))
	s, err := client.CoreV1().Secrets("default").Get(t.Context(), "ci", metav1.GetOptions{})
	require.NoError(t, err)
	require.NotContains(t, s.String(), key, "the key is stored nowhere")

	_, _, err = keys("create", "--name=ci", "--team=search")
	require.ErrorContains(t, err, "choose another name")
	for _, wrong := range [][]string{{"--name=A", "--team=a"}, {"--name=a", "--team=A"}, {"--name=a"}, {"--name=a", "--team=a", "--role=root"}} {
		_, _, err := keys(append([]string{"create"}, wrong...)...)
		require.Error(t, err, wrong)
	}

	broken := s.DeepCopy()
	broken.ObjectMeta = metav1.ObjectMeta{Name: "broken"}
	broken.Data["role"] = []byte("root")
	other := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "other"}, StringData: map[string]string{"role": "admin"}}
	for _, s := range []*corev1.Secret{broken, other} {
		_, err := client.CoreV1().Secrets("default").Create(t.Context(), s, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	stdout, _, err = keys("list")
	require.NoError(t, err)
	require.Regexp(t, `^NAME +TEAM +ROLE +CREATED +REFUSED\nbroken +search .* data.role: role "root".*\nci +search +member +\S+Z +-\n$`, stdout,
		"Secrets of other types are not listed")
	stdout, _, err = keys("list", "-o", "json")
	require.NoError(t, err)
	var listed []listedKey
	require.NoError(t, json.Unmarshal([]byte(stdout), &listed))
	require.Len(t, listed, 2)
	require.Equal(t, access.Member, listed[1].Role)
	require.Empty(t, listed[1].Refused)

	stdout, _, err = keys("revoke", "ci")
	require.NoError(t, err)
	require.Equal(t, "key ci of team search is revoked\n", stdout)
	eventually(key, access.ErrUnknownKey)
	_, _, err = keys("revoke", "ci")
	require.ErrorContains(t, err, "there is no key ci")
	_, _, err = keys("revoke", "other")
	require.ErrorContains(t, err, "no API key")
	_, err = client.CoreV1().Secrets("default").Get(t.Context(), "other", metav1.GetOptions{})
	require.NoError(t, err, "it deletes keys only")
}
