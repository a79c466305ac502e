package credentials

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sealer(t *testing.T, key string) *Sealer {
	k, err := sandboxaccess.NewKey([]byte(strings.Repeat(key, 32)))
	require.NoError(t, err)
	return NewSealer(k)
}

// Invariant: P38
func TestSealedHeadersOpenForTheirSandboxOnly(t *testing.T) {
	s := sealer(t, "k")
	headers := []Header{{"a.example", 443, "authorization", "Bearer canary"}, {"b.example", 8443, "x-key", `"`}}
	sealed := s.Seal("k3x9", headers)
	for _, word := range []string{"canary", "authorization", "a.example"} {
		require.NotContains(t, string(sealed), word)
	}
	require.NotContains(t, fmt.Sprintf("%v %s %+v", headers, headers[0], headers), "canary")
	got, err := s.Open("k3x9", sealed)
	require.NoError(t, err)
	require.Equal(t, headers, got)
	got, err = sealer(t, "k").Open("k3x9", sealed) // of another replica
	require.NoError(t, err)
	require.Equal(t, headers, got)

	cut := sealed[:len(sealed)-1]
	changed := append(append([]byte{}, cut...), sealed[len(sealed)-1]^1)
	for name, open := range map[string]func() ([]Header, error){
		"another sandbox": func() ([]Header, error) { return s.Open("k3x", sealed) },
		"another key":     func() ([]Header, error) { return sealer(t, "l").Open("k3x9", sealed) },
		"no key":          func() ([]Header, error) { return (*Sealer)(nil).Open("k3x9", sealed) },
		"cut":             func() ([]Header, error) { return s.Open("k3x9", cut) },
		"changed":         func() ([]Header, error) { return s.Open("k3x9", changed) },
		"short":           func() ([]Header, error) { return s.Open("k3x9", sealed[:3]) },
		"a later form": func() ([]Header, error) {
			return s.Open("k3x9", s.aead.Seal(nil, nil, []byte(`{"canary":1}`), []byte("k3x9")))
		},
	} {
		got, err := open()
		require.Error(t, err, name)
		require.Empty(t, got, name)
		require.NotContains(t, err.Error(), "canary", name)
	}
	require.Nil(t, s.Seal("k3x9", nil))
	got, err = (*Sealer)(nil).Open("k3x9", nil)
	require.NoError(t, err)
	require.Empty(t, got)
}

func secret(name string, data map[string]string) *corev1.Secret {
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "keys"}, Type: SecretType, Data: map[string][]byte{}}
	for k, v := range data {
		s.Data[k] = []byte(v)
	}
	return s
}

// Invariant: P38
func TestValuesFollowTheSecretsAndAreNeverLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		client := fake.NewClientset(secret("openai", map[string]string{"key": "Bearer canary\n", "broken": "canary\n1"}))
		v, err := NewValues(Options{Client: client, Namespace: "keys", Log: zap.New(core)})
		require.NoError(t, err)
		values, changed := v.All()
		require.Nil(t, values, "they have not been read")
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { v.Run(ctx) })
		<-changed
		values, changed = v.All()
		require.Equal(t, map[string]string{"openai/key": "Bearer canary"}, values)
		secrets := client.CoreV1().Secrets("keys")
		_, err = secrets.Update(ctx, secret("openai", map[string]string{"key": "Bearer canary", "broken": "canary\n2"}), metav1.UpdateOptions{})
		require.NoError(t, err)
		time.Sleep(time.Second)
		synctest.Wait()
		select {
		case <-changed:
			t.Fatal("nothing has changed")
		default:
		}
		many := map[string]string{}
		for i := range maxValues + 1 {
			many[fmt.Sprint(i)] = "canary"
		}
		_, err = secrets.Create(ctx, secret("many", many), metav1.CreateOptions{})
		require.NoError(t, err)
		<-changed
		values, changed = v.All()
		require.Len(t, values, maxValues)
		require.NoError(t, secrets.Delete(ctx, "many", metav1.DeleteOptions{}))
		require.NoError(t, secrets.Delete(ctx, "openai", metav1.DeleteOptions{}))
		<-changed
		time.Sleep(time.Second)
		values, _ = v.All()
		require.Empty(t, values)
		require.NotNil(t, values)
		stop()
		running.Wait()
		require.Equal(t, 1, logs.FilterField(zap.String("credential", "openai/broken")).Len(), "once for one reason")
		for _, e := range logs.All() {
			require.NotContains(t, fmt.Sprint(e.Message, e.ContextMap()), "canary")
		}
	})
}

func TestOptionsAreRequired(t *testing.T) {
	_, err := NewValues(Options{})
	require.ErrorContains(t, err, "Client")
}
