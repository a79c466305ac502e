package podnet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const relayPort = 8080

// Relay is a pod that connects to other pods, for clients that can reach only the
// API server. It may be used concurrently.
type Relay struct {
	config *rest.Config
	client kubernetes.Interface
	pod    *corev1.Pod
}

// StartRelay runs image, which must have demo-sandbox on its PATH, as a relay in
// a namespace, and returns when it answers. The caller must Close it.
func StartRelay(ctx context.Context, config *rest.Config, namespace, image string) (*Relay, error) {
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
	r := &Relay{config: config, client: client, pod: pod}
	if err := r.await(ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return nil, fmt.Errorf("start a relay: %w", errors.Join(err, r.Close(ctx)))
	}
	return r, nil
}

func (r *Relay) await(ctx context.Context) error {
	var last string
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		pod, err := r.client.CoreV1().Pods(r.pod.Namespace).Get(ctx, r.pod.Name, metav1.GetOptions{})
		if err != nil {
			last = err.Error()
			return false, nil //nolint:nilerr // it may work the next time
		}
		last = fmt.Sprintf("pod %s is %s", pod.Name, pod.Status.Phase)
		for _, c := range pod.Status.ContainerStatuses {
			if w := c.State.Waiting; w != nil {
				last += fmt.Sprintf(", %s %s", w.Reason, w.Message)
			}
		}
		if pod.Status.Phase != corev1.PodRunning {
			return false, nil
		}
		if err := r.answers(ctx); err != nil {
			last = err.Error()
			return false, nil //nolint:nilerr // it runs and does not listen yet
		}
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("%w, last: %s", err, last)
	}
	return nil
}

func (r *Relay) answers(ctx context.Context) error {
	c, err := Dial(ctx, r.config, r.pod.Namespace, r.pod.Name, relayPort)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

// Dial connects to a port of an address inside the cluster. ctx bounds the
// connection set-up only.
func (r *Relay) Dial(ctx context.Context, ip string, port int) (net.Conn, error) {
	to := net.JoinHostPort(ip, strconv.Itoa(port))
	c, err := Dial(ctx, r.config, r.pod.Namespace, r.pod.Name, relayPort)
	if err != nil {
		return nil, fmt.Errorf("relay to %s: %w", to, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	from, err := ask(c, to)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		stop()
		_ = c.Close()
		return nil, fmt.Errorf("relay to %s: %w", to, err)
	}
	return &relayed{Conn: c, from: from}, nil
}

// ask has the relay connect and returns the reader of the target's bytes.
func ask(c net.Conn, to string) (*bufio.Reader, error) {
	request := &http.Request{Method: http.MethodConnect, URL: &url.URL{Host: to}, Host: to, Header: http.Header{}}
	if err := request.Write(c); err != nil {
		return nil, err
	}
	from := bufio.NewReader(c)
	response, err := http.ReadResponse(from, request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		return from, nil
	case http.StatusBadGateway:
		why, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
		return nil, fmt.Errorf("%w: %s", ErrUnreachable, strings.TrimSpace(string(why)))
	}
	return nil, fmt.Errorf("the relay answers %s", response.Status)
}

// relayed is a connection whose reader may already hold the target's first bytes,
// which came with the relay's answer.
type relayed struct {
	net.Conn
	from *bufio.Reader
}

func (r *relayed) Read(b []byte) (int, error) { return r.from.Read(b) }

// Close deletes the relay's pod. Connections end with it.
func (r *Relay) Close(ctx context.Context) error {
	err := r.client.CoreV1().Pods(r.pod.Namespace).Delete(ctx, r.pod.Name,
		metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the relay: %w", err)
	}
	return nil
}
