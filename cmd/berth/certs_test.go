package main

import (
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// certs is an API server on which certificates are kept.
type certs struct {
	*testing.T
	secrets    typedcorev1.SecretInterface
	kubeconfig string
	// ca, allocator, router and egress are the names of the Secrets, four for each test.
	ca, allocator, router, egress string
}

// in is the same for another test, with Secrets of its own.
func (c *certs) in(t *testing.T, prefix string) *certs {
	return &certs{T: t, secrets: c.secrets, kubeconfig: c.kubeconfig, ca: prefix + "-ca", allocator: prefix + "-allocator", router: prefix + "-router",
		egress: prefix + "-egress"}
}

func (c *certs) names() []string { return []string{c.ca, c.allocator, c.router, c.egress} }

func (c *certs) ensure() (stdout string, err error) {
	c.Helper()
	return berth(c.T, "certs", "ensure", "--kubeconfig="+c.kubeconfig, "--namespace=default",
		"--ca-secret="+c.ca, "--allocator-secret="+c.allocator, "--router-secret="+c.router, "--egress-secret="+c.egress)
}

// ensureAt does the same at another time.
func (c *certs) ensureAt(now time.Time) error {
	k := keeper{secrets: c.secrets, o: &output{out: io.Discard}, now: now}
	return k.all(c.Context(), c.ca, c.allocator, c.router, c.egress)
}

func (c *certs) get(name string) *corev1.Secret {
	c.Helper()
	s, err := c.secrets.Get(c.Context(), name, metav1.GetOptions{})
	require.NoError(c, err)
	return s
}

// versions are the resource versions of the Secrets.
func (c *certs) versions() (all []string) {
	c.Helper()
	for _, name := range c.names() {
		all = append(all, c.get(name).ResourceVersion)
	}
	return all
}

// change writes a Secret anew.
func (c *certs) change(name string, change func(*corev1.Secret)) {
	c.Helper()
	s := c.get(name)
	change(s)
	_, err := c.secrets.Update(c.Context(), s, metav1.UpdateOptions{})
	require.NoError(c, err)
}

func files(s *corev1.Secret) controltls.Files {
	return controltls.Files{Cert: s.Data[controltls.CertFile], Key: s.Data[controltls.KeyFile], CA: s.Data[controltls.CAFile]}
}

func (c *certs) authority() *controltls.Authority {
	c.Helper()
	f := files(c.get(c.ca))
	a, err := controltls.ParseAuthority(f.Cert, f.Key)
	require.NoError(c, err)
	return a
}

// good requires Secrets that routers and allocators can use with each
// other.
func (c *certs) good(now time.Time) {
	c.Helper()
	a := c.authority()
	require.True(c, a.Fresh(now))
	for secret, role := range map[string]string{c.allocator: controltls.AllocatorName, c.router: controltls.RouterName,
		c.egress: controltls.EgressName} {
		s := c.get(secret)
		require.Equal(c, corev1.SecretTypeTLS, s.Type)
		require.True(c, a.Good(files(s), role, now), "%s is not good for a %s", secret, role)
		// As a pod mounts it.
		dir := c.TempDir()
		for file, content := range s.Data {
			require.NoError(c, os.WriteFile(filepath.Join(dir, file), content, 0o600))
		}
		open := controltls.Server
		if role != controltls.AllocatorName {
			open = func(dir string) (credentials.TransportCredentials, func(), error) {
				return controltls.Client(dir, role)
			}
		}
		_, stop, err := open(dir)
		require.NoError(c, err)
		stop()
		require.NotEqual(c, files(c.get(c.ca)).Key, s.Data[controltls.KeyFile])
	}
	require.Equal(c, corev1.SecretTypeTLS, c.get(c.ca).Type)
}

func TestCertsEnsure(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{})
	clients, err := kubernetes.NewForConfig(cluster.RestConfig())
	require.NoError(t, err)
	all := &certs{secrets: clients.CoreV1().Secrets("default"), kubeconfig: cluster.Kubeconfig()}

	t.Run("API keys", func(t *testing.T) { testKeys(t, clients, cluster.Kubeconfig()) }) // shares the API server
	t.Run("the Secrets are made, and once more changes nothing", func(t *testing.T) {
		c := all.in(t, "first")
		stdout, err := c.ensure()
		require.NoError(t, err)
		require.Equal(t, "Secret first-ca is written\nSecret first-allocator is written\nSecret first-router is written\nSecret first-egress is written\n", stdout)
		c.good(time.Now())
		before := c.versions()
		stdout, err = c.ensure()
		require.NoError(t, err)
		require.Equal(t, "Secret first-ca is good\nSecret first-allocator is good\nSecret first-router is good\nSecret first-egress is good\n", stdout)
		require.Equal(t, before, c.versions())
	})

	t.Run("several at a time agree on one authority", func(t *testing.T) {
		c := all.in(t, "race")
		const n = 8
		errs := make(chan error, n)
		for range n {
			go func() { _, err := c.ensure(); errs <- err }()
		}
		for range n {
			require.NoError(t, <-errs)
		}
		c.good(time.Now())
		later := time.Now().AddDate(6, 0, 0) // and on the next one
		for range n {
			go func() { errs <- c.ensureAt(later) }()
		}
		for range n {
			require.NoError(t, <-errs)
		}
		c.good(later)
	})

	t.Run("a certificate that is not good is made again, and nothing else", func(t *testing.T) {
		c := all.in(t, "leaf")
		_, err := c.ensure()
		require.NoError(t, err)
		foreign, err := controltls.NewAuthority(time.Now())
		require.NoError(t, err)
		others, err := foreign.Issue(controltls.AllocatorName, time.Now())
		require.NoError(t, err)
		put := func(f controltls.Files) func(*corev1.Secret) {
			return func(s *corev1.Secret) {
				s.Data = map[string][]byte{controltls.CertFile: f.Cert, controltls.KeyFile: f.Key, controltls.CAFile: f.CA}
			}
		}
		own := files(c.get(c.allocator))
		for name, spoil := range map[string]func(*corev1.Secret){
			"another authority's":      put(others),
			"a router's":               put(files(c.get(c.router))),
			"with another authority":   put(controltls.Files{Cert: own.Cert, Key: own.Key, CA: others.CA}),
			"without an authority":     func(s *corev1.Secret) { delete(s.Data, controltls.CAFile) },
			"with another one's key":   put(controltls.Files{Cert: own.Cert, Key: others.Key, CA: own.CA}),
			"something else entirely":  put(controltls.Files{Cert: []byte("x"), Key: []byte("y"), CA: []byte("z")}),
			"that has half of its end": put(issue(t, c.authority(), time.Now().Add(-controltls.Validity/2-time.Hour))),
		} {
			t.Run(name, func(t *testing.T) {
				c := all.in(t, "leaf")
				c.change(c.allocator, spoil)
				require.False(t, c.authority().Good(files(c.get(c.allocator)), controltls.AllocatorName, time.Now()))
				before := c.versions()
				stdout, err := c.ensure()
				require.NoError(t, err)
				require.Equal(t, "Secret leaf-ca is good\nSecret leaf-allocator is written\nSecret leaf-router is good\nSecret leaf-egress is good\n", stdout)
				c.good(time.Now())
				after := c.versions()
				require.Equal(t, before[0], after[0])
				require.NotEqual(t, before[1], after[1])
				require.Equal(t, before[2], after[2])
			})
		}
	})

	t.Run("all is made again when half of its time is over", func(t *testing.T) {
		c := all.in(t, "old")
		_, err := c.ensure()
		require.NoError(t, err)
		before := c.versions()
		later := time.Now().AddDate(4, 0, 0)
		require.NoError(t, c.ensureAt(later))
		c.good(later)
		require.Equal(t, before, c.versions())
		later = time.Now().AddDate(6, 0, 0)
		require.NoError(t, c.ensureAt(later))
		c.good(later)
		for i, version := range c.versions() {
			require.NotEqual(t, before[i], version)
		}
	})

	t.Run("a Secret that another program made is refused and untouched", func(t *testing.T) {
		for i, prefix := range []string{"foreign-1", "foreign-2", "foreign-3", "foreign-4"} {
			c := all.in(t, prefix)
			name := c.names()[i]
			for _, labels := range []map[string]string{nil, {"app.kubernetes.io/managed-by": "Helm"}} {
				foreign, err := c.secrets.Create(t.Context(), &corev1.Secret{
					ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Data: map[string][]byte{"tls.key": []byte("precious")},
				}, metav1.CreateOptions{})
				require.NoError(t, err)
				_, err = c.ensure()
				require.ErrorContains(t, err, "the Secret "+name+" was not made by this command")
				require.Equal(t, foreign, c.get(name))
				require.NoError(t, c.secrets.Delete(t.Context(), name, metav1.DeleteOptions{}))
			}
		}
	})

	t.Run("an authority that cannot be used is named and untouched", func(t *testing.T) {
		c := all.in(t, "broken")
		_, err := c.ensure()
		require.NoError(t, err)
		leaf := files(c.get(c.router))
		for name, spoil := range map[string]func(*corev1.Secret){
			"no PEM":         func(s *corev1.Secret) { s.Data[controltls.CertFile] = []byte("x") },
			"no key":         func(s *corev1.Secret) { s.Data[controltls.KeyFile] = nil },
			"no certificate": func(s *corev1.Secret) { s.Data[controltls.CertFile] = nil },
			"a router's":     func(s *corev1.Secret) { s.Data[controltls.CertFile], s.Data[controltls.KeyFile] = leaf.Cert, leaf.Key },
		} {
			c.change(c.ca, spoil)
			before := c.versions()
			_, err := c.ensure()
			require.ErrorContains(t, err, "the Secret broken-ca cannot be used", name)
			require.ErrorContains(t, err, "delete it", name)
			require.Equal(t, before, c.versions(), name)
		}
		require.NoError(t, c.secrets.Delete(t.Context(), c.ca, metav1.DeleteOptions{})) // as the error advised
		_, err = c.ensure()
		require.NoError(t, err)
		c.good(time.Now())
	})

	t.Run("it needs no right but to create Secrets, and to read and write its own", func(t *testing.T) {
		c := all.in(t, "rights")
		_, err := clients.RbacV1().Roles("default").Create(t.Context(), &rbacv1.Role{
			ObjectMeta: metav1.ObjectMeta{Name: "certs"},
			Rules: []rbacv1.PolicyRule{
				{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"create"}},
				{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: c.names(), Verbs: []string{"get", "update"}},
			},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		_, err = clients.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "certs"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "certs"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "certs"}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		config, err := clientcmd.LoadFromFile(c.kubeconfig)
		require.NoError(t, err)
		for _, user := range config.AuthInfos {
			user.Impersonate = "system:serviceaccount:default:certs"
		}
		c.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
		require.NoError(t, clientcmd.WriteToFile(*config, c.kubeconfig))
		require.Eventually(t, func() bool { // once the authorizer has seen the role
			_, err = c.ensure()
			return err == nil
		}, time.Minute, 50*time.Millisecond)
		c.good(time.Now())
		c.change(c.router, func(s *corev1.Secret) { s.Data[controltls.CertFile] = []byte("x") })
		_, err = c.ensure()
		require.NoError(t, err)
		c.good(time.Now())
		_, err = c.in(t, "others").ensure()
		require.ErrorContains(t, err, "others-ca")
	})

	t.Run("a namespace that is not there is named", func(t *testing.T) {
		_, err := berth(t, "certs", "ensure", "--kubeconfig="+all.kubeconfig, "--namespace=nowhere", "--ca-secret=a", "--allocator-secret=b", "--router-secret=c")
		require.ErrorContains(t, err, `"nowhere"`)
	})
}

// issue makes an allocator's certificate at another time.
func issue(t *testing.T, a *controltls.Authority, now time.Time) controltls.Files {
	t.Helper()
	f, err := a.Issue(controltls.AllocatorName, now)
	require.NoError(t, err)
	return f
}

func TestCertsEnsureWantsThreeSecretsAndACluster(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := berth(t, "certs", "ensure")
	for _, flag := range []string{"--namespace", "--ca-secret", "--allocator-secret", "--router-secret"} {
		require.ErrorContains(t, err, flag)
	}
	// One of them would overwrite another, and pods would mount the authority.
	for _, names := range [][4]string{
		{"a", "a", "b", ""}, {"a", "b", "a", ""}, {"a", "b", "b", ""}, {"a", "b", "c", "a"}, {"a", "b", "c", "b"}, {"a", "b", "c", "c"},
	} {
		_, err = berth(t, "certs", "ensure", "--namespace=n", "--ca-secret="+names[0], "--allocator-secret="+names[1],
			"--router-secret="+names[2], "--egress-secret="+names[3])
		require.ErrorContains(t, err, "different Secrets")
	}
	enough := []string{"certs", "ensure", "--namespace=n", "--ca-secret=a", "--allocator-secret=b", "--router-secret=c"}
	_, err = berth(t, enough...)
	require.ErrorContains(t, err, "--kubeconfig: not set")
	_, err = berth(t, append(enough, "--kubeconfig=/nonexistent")...)
	require.ErrorContains(t, err, "--kubeconfig: ")
}
