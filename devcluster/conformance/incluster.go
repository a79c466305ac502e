package conformance

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/internal/podnet"
)

// setUpLimit bounds what is made before the table and removed after it.
const setUpLimit = 2 * time.Minute

// inClusterGuard is long because nodes may be busy and runtimes slow.
const inClusterGuard = 3 * time.Minute

// RunInCluster runs the whole table in a cluster of which nothing but the API
// server can be reached, in a namespace of its own that it deletes afterwards.
// image has demo-sandbox on its PATH, and the nodes have it or can pull it.
func RunInCluster(t *testing.T, config *rest.Config, image string) {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	t.Cleanup(func() { // the clients of a config share connections
		if transport, err := rest.TransportFor(config); err == nil {
			utilnet.CloseIdleConnectionsFor(transport)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), setUpLimit)
	defer cancel()
	namespace := makeNamespace(ctx, t, client)
	pods, err := podnet.StartRelay(ctx, config, namespace, image)
	require.NoError(t, err)
	Run(t, Options{RestConfig: config, Namespace: namespace, Image: image, Client: pods, Guard: inClusterGuard})
}

func makeNamespace(ctx context.Context, t *testing.T, client kubernetes.Interface) string {
	t.Helper()
	made, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "conformance-"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { // with all that is in it
		ctx, cancel := context.WithTimeout(context.Background(), setUpLimit)
		defer cancel()
		err := client.CoreV1().Namespaces().Delete(ctx, made.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("namespace %s stays behind: %v", made.Name, err)
		}
	})
	// Pods are refused until their namespace has its service account.
	require.NoError(t, wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true,
		func(ctx context.Context) (bool, error) {
			_, err := client.CoreV1().ServiceAccounts(made.Name).Get(ctx, "default", metav1.GetOptions{})
			return err == nil, nil //nolint:nilerr // not yet
		}), "namespace %s has no default service account", made.Name)
	return made.Name
}
