package podnet

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const relayPort = 8080

// StartRelay runs image, which must have demo-sandbox on its PATH, as a pod in a
// namespace, and returns a client whose requests that pod passes on. The client reaches
// any address inside the cluster. An address that does not answer is a 502. StartRelay
// returns when the pod answers. The pod ends with its namespace.
func StartRelay(ctx context.Context, config *rest.Config, namespace, image string) (*http.Client, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("start a relay: %w", err)
	}
	yes, no, user := true, false, int64(65532)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "relay-"},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: &no,
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &user,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: "relay", Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
				Command: []string{"demo-sandbox", "--relay", "--ports", strconv.Itoa(relayPort)},
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
		},
	}
	if pod, err = client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return nil, fmt.Errorf("start a relay: %w", err)
	}
	pods := relayed(func(ctx context.Context) (net.Conn, error) {
		return Dial(ctx, config, namespace, pod.Name, relayPort)
	})
	var last error
	err = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		last = passes(ctx, pods)
		return last == nil, nil
	})
	if err != nil {
		return nil, fmt.Errorf("start relay %s/%s: %w, last: %w", namespace, pod.Name, err, last)
	}
	return pods, nil
}

// relayed is a client that sends all requests to the proxy that dial reaches.
func relayed(dial func(context.Context) (net.Conn, error)) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		Proxy:             http.ProxyURL(&url.URL{Scheme: "http", Host: "relay"}),
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}}
}

// passes has the relay ask itself.
func passes(ctx context.Context, pods *http.Client) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/healthz", relayPort),
		http.NoBody)
	if err != nil {
		return err
	}
	response, err := pods.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("it answers %s", response.Status)
	}
	return nil
}
