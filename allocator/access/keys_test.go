package access

import (
	"context"
	"crypto/sha256"
	"errors"
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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// secret is the Secret of a key.
func secret(t *testing.T, key string, c Caller) *corev1.Secret {
	t.Helper()
	s, err := NewSecret(key, c)
	require.NoError(t, err)
	s.Namespace = "keys"
	return s
}

var member = Caller{Key: "ci", Team: "a", Role: Member}

// world is a running Keys.
type world struct {
	*testing.T
	client *fake.Clientset
	keys   *Keys
	logs   *observer.ObservedLogs
}

// run runs f in a bubble, with the Keys of these Secrets.
func run(t *testing.T, f func(w world), secrets ...runtime.Object) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		w := world{t, fake.NewClientset(secrets...), nil, logs}
		var err error
		w.keys, err = NewKeys(Options{Client: w.client, Namespace: "keys", Log: zap.New(core)})
		require.NoError(t, err)
		require.ErrorIs(t, w.keys.Ready(), ErrNotLoaded)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { w.keys.Run(ctx) })
		time.Sleep(time.Second) // client-go asks every 0.1 s whether the list is complete
		f(w)
		stop()
		running.Wait()
	})
}

// caller returns who presents a key, once every change has been seen.
func (w world) caller(key string) (Caller, error) {
	synctest.Wait()
	return w.keys.Caller(key)
}

func (w world) opens(key string) bool {
	_, err := w.caller(key)
	if err != nil {
		require.ErrorIs(w, err, ErrUnknownKey)
	}
	return err == nil
}

func (w world) create(s *corev1.Secret) {
	_, err := w.client.CoreV1().Secrets("keys").Create(w.Context(), s, metav1.CreateOptions{})
	require.NoError(w, err)
}

func (w world) update(s *corev1.Secret) {
	_, err := w.client.CoreV1().Secrets("keys").Update(w.Context(), s, metav1.UpdateOptions{})
	require.NoError(w, err)
}

func (w world) remove(name string) {
	require.NoError(w, w.client.CoreV1().Secrets("keys").Delete(w.Context(), name, metav1.DeleteOptions{}))
}

func TestKeyIsItsSecretsNameTeamAndRole(t *testing.T) {
	key := NewKey()
	run(t, func(w world) {
		require.NoError(t, w.keys.Ready())
		c, err := w.caller(key)
		require.NoError(t, err)
		require.Equal(t, member, c)
		for _, wrong := range []string{"", "ci", "e2b_", key[:len(key)-1], key + "0", key + " ", "E2B_" + key[4:], NewKey()} {
			require.False(t, w.opens(wrong), wrong)
		}
	}, secret(t, key, member))
}

func TestChangesOfSecretsCountAtOnce(t *testing.T) {
	one, two := NewKey(), NewKey()
	run(t, func(w world) {
		require.Equal(t, 1, w.logs.FilterMessageSnippet("there are no API keys").Len())
		require.False(t, w.opens(one))
		w.create(secret(t, one, member))
		w.create(secret(t, two, Caller{Key: "two", Team: "b", Role: ReadOnly}))
		require.True(t, w.opens(one))
		w.update(secret(t, one, Caller{Key: "ci", Team: "a", Role: ReadOnly}))
		c, err := w.caller(one)
		require.NoError(t, err)
		require.Equal(t, ReadOnly, c.Role)
		w.remove("ci")
		require.False(t, w.opens(one))
		require.True(t, w.opens(two))
		dying := secret(t, two, Caller{Key: "two", Team: "b", Role: ReadOnly})
		dying.Finalizers, dying.DeletionTimestamp = []string{"x/y"}, &metav1.Time{Time: metav1.Now().Time}
		w.update(dying)
		require.False(t, w.opens(two), "it is being deleted")
	})
}

// Routers get the keys by team.
func TestKeysByTeamFollowTheSecrets(t *testing.T) {
	one, two := NewKey(), NewKey()
	hashOf := func(key string) [][sha256.Size]byte { return [][sha256.Size]byte{sha256.Sum256([]byte(key))} }
	k, err := NewKeys(Options{Client: fake.NewClientset(), Namespace: "keys", Log: zap.NewNop()})
	require.NoError(t, err)
	byTeam, changed := k.ByTeam()
	require.Nil(t, byTeam, "they have not been read")
	current := k.Current()
	k.replace(map[hashed]Caller{})
	<-changed
	require.Error(t, current.Err())
	byTeam, _ = k.ByTeam()
	require.NotNil(t, byTeam)
	require.Empty(t, byTeam)
	run(t, func(w world) {
		byTeam, changed := w.keys.ByTeam()
		require.Equal(t, map[string][][sha256.Size]byte{"a": hashOf(one)}, byTeam)
		w.create(secret(t, two, Caller{Key: "two", Team: "b", Role: ReadOnly}))
		<-changed
		byTeam, changed = w.keys.ByTeam()
		require.Equal(t, map[string][][sha256.Size]byte{"a": hashOf(one), "b": hashOf(two)}, byTeam)
		annotated := secret(t, one, member)
		annotated.Annotations = map[string]string{"note": "x"}
		w.update(annotated)
		synctest.Wait()
		select {
		case <-changed:
			t.Error("no key has changed")
		default:
		}
		w.remove("ci")
		<-changed
		byTeam, _ = w.keys.ByTeam()
		require.Equal(t, map[string][][sha256.Size]byte{"b": hashOf(two)}, byTeam)
	}, secret(t, one, member))
}

func TestBrokenSecretOpensNothingAndIsNamed(t *testing.T) {
	for name, spoil := range map[string]func(*corev1.Secret){
		"data.sha256":           func(s *corev1.Secret) { s.Data["sha256"] = s.Data["sha256"][1:] },
		"data.sha256: must":     func(s *corev1.Secret) { delete(s.Data, "sha256") },
		"data.team":             func(s *corev1.Secret) { s.Data["team"] = []byte("A team") },
		"data.team: \"\"":       func(s *corev1.Secret) { delete(s.Data, "team") },
		"data.role":             func(s *corev1.Secret) { s.Data["role"] = []byte("root") },
		"data.role: role \"\"":  func(s *corev1.Secret) { delete(s.Data, "role") },
		"data.expires: unknown": func(s *corev1.Secret) { s.Data["expires"] = []byte("2030") },
		"type \"Opaque\"":       func(s *corev1.Secret) { s.Type = corev1.SecretTypeOpaque },
	} {
		t.Run(name, func(t *testing.T) {
			key := NewKey()
			good, bad := secret(t, key, member), secret(t, key, member)
			spoil(bad)
			run(t, func(w world) {
				require.False(t, w.opens(key))
				lines := w.logs.FilterMessageSnippet("opens nothing").All()
				require.Len(t, lines, 1)
				require.Equal(t, "ci", lines[0].ContextMap()["secret"])
				require.Contains(t, lines[0].ContextMap()["why"], name)
				require.NotContains(t, lines[0].ContextMap()["why"], key)
				w.create(secret(t, NewKey(), Caller{Key: "other", Team: "b", Role: Admin}))
				synctest.Wait()
				require.Equal(t, 1, w.logs.FilterMessageSnippet("opens nothing").Len(), "it is said once")
				w.update(good)
				require.True(t, w.opens(key))
				w.update(bad)
				require.False(t, w.opens(key), "a Secret that became wrong keeps nothing open")
			}, bad)
		})
	}
}

func TestKeyInTwoSecretsOpensNothing(t *testing.T) {
	key := NewKey()
	run(t, func(w world) {
		w.create(secret(t, key, Caller{Key: "copy", Team: "b", Role: Admin}))
		require.False(t, w.opens(key))
		require.Equal(t, 2, w.logs.FilterMessageSnippet("opens nothing").Len())
		w.remove("copy")
		c, err := w.caller(key)
		require.NoError(t, err)
		require.Equal(t, member, c)
	}, secret(t, key, member))
}

func TestNothingIsJudgedBeforeTheFirstList(t *testing.T) {
	key := NewKey()
	client := fake.NewClientset(secret(t, key, member))
	client.PrependReactor("list", "secrets", func(ktesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("the API server is away")
	})
	k, err := NewKeys(Options{Client: client, Namespace: "keys", Log: zap.NewNop()})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { k.Run(ctx) })
	_, err = k.Caller(key)
	require.ErrorIs(t, err, ErrNotLoaded)
	_, err = k.Caller("wrong")
	require.ErrorIs(t, err, ErrNotLoaded, "a key that may be valid is not called unknown")
	stop()
	running.Wait()
}

func TestNewKeysHaveTheShapeOfTheSDKs(t *testing.T) {
	require.Regexp(t, `^e2b_[0-9a-f]{40}$`, NewKey())
	require.NotEqual(t, NewKey(), NewKey())
	_, err := NewSecret("e2b_0123456789abcdef", member)
	require.ErrorContains(t, err, "40")
	_, err = NewSecret(NewKey(), Caller{Key: "ci", Team: "a"})
	require.ErrorContains(t, err, "role")
}

func TestOptionsAreRequired(t *testing.T) {
	_, err := NewKeys(Options{})
	require.ErrorContains(t, err, "Namespace")
}
