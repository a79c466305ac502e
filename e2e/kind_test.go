package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// The NodePorts of the Services.
const (
	nodePortGateway = 30080
	nodePortAPI     = 30081
)

// kindPodSubnet is where kind's pods get their addresses, unless its
// configuration says otherwise.
const kindPodSubnet = "10.244.0.0/16"

// createKind creates a cluster whose NodePorts are mapped to free ports of
// 127.0.0.1, and loads the images. Without workers its one node has all pods. remove deletes it, also after an error.
func createKind(ctx context.Context, workers int) (in installation, remove func() error, err error) {
	remove = func() error { return nil }
	for _, program := range []string{"kind", "docker"} {
		if _, err := exec.LookPath(program); err != nil {
			return in, remove, fmt.Errorf("%s=%s needs %s on PATH", envProvider, onKind, program)
		}
	}
	archives := os.Getenv(envArchives)
	if archives == "" {
		archives = filepath.Join("..", "bin", "images")
	}
	images := map[string]name.Tag{}
	for _, program := range []string{"allocator", "router", "agent", "demo-sandbox", "envoy"} {
		if images[program], err = tagOf(filepath.Join(archives, program+".tar")); err != nil {
			return in, remove, fmt.Errorf("%w; \"make image-archives\" makes them", err)
		}
	}
	dir, err := os.MkdirTemp("", "berth-kind-")
	if err != nil {
		return in, remove, err
	}
	cluster := "berth-e2e-" + rand.String(5)
	in = installation{kubeconfig: filepath.Join(dir, "kubeconfig"),
		sandboxImage: short(images["demo-sandbox"]) + ":" + images["demo-sandbox"].TagStr()}
	remove = func() error {
		limit, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		return errors.Join(command(limit, "kind", "delete", "cluster", "--name", cluster, "--kubeconfig", in.kubeconfig),
			os.RemoveAll(dir))
	}
	var mappings []map[string]any
	for port, address := range map[int]*string{nodePortGateway: &in.gatewayAddress, nodePortAPI: &in.apiAddress} {
		free, err := freePort()
		if err != nil {
			return in, remove, err
		}
		*address = fmt.Sprintf("127.0.0.1:%d", free)
		mappings = append(mappings, map[string]any{"containerPort": port, "hostPort": free, "listenAddress": "127.0.0.1"})
	}
	nodes := []any{map[string]any{"role": "control-plane", "extraPortMappings": mappings}}
	for range workers {
		nodes = append(nodes, map[string]any{"role": "worker"})
	}
	raw, err := json.Marshal(map[string]any{"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes})
	if err != nil {
		return in, remove, err
	}
	config := filepath.Join(dir, "kind.yaml")
	if err := os.WriteFile(config, raw, 0o600); err != nil {
		return in, remove, err
	}
	create := []string{"kind", "create", "cluster", "--name", cluster, "--config", config, "--kubeconfig", in.kubeconfig,
		"--wait", "3m"}
	if image := os.Getenv(envNodeImage); image != "" {
		create = append(create, "--image", image)
	}
	if err := command(ctx, create...); err != nil {
		return in, remove, err
	}
	load, err := writeImages(dir, filepath.Join(archives, "demo-sandbox.tar"))
	if err != nil {
		return in, remove, err
	}
	for program := range images {
		load = append(load, filepath.Join(archives, program+".tar"))
	}
	for _, archive := range load {
		if err := command(ctx, "kind", "load", "image-archive", archive, "--name", cluster); err != nil {
			return in, remove, err
		}
	}
	in.values = values([]string{kindPodSubnet})
	in.values["image"] = map[string]any{"tag": images["allocator"].TagStr(), "pullPolicy": "Never"}
	in.values["allocator"].(map[string]any)["image"] = map[string]any{"repository": short(images["allocator"])}
	in.values["agent"] = map[string]any{"image": map[string]any{"repository": short(images["agent"])}}
	in.values["router"] = map[string]any{"image": map[string]any{"repository": short(images["router"])}}
	in.values["envoy"] = map[string]any{"image": map[string]any{"repository": short(images["envoy"]),
		"tag": images["envoy"].TagStr()}}
	in.values["gateway"].(map[string]any)["service"] = map[string]any{"type": "NodePort", "nodePort": nodePortGateway}
	in.values["api"] = map[string]any{"service": map[string]any{"type": "NodePort", "nodePort": nodePortAPI}}
	return in, remove, waitUsable(ctx, in.kubeconfig)
}

// tagOf reads the name of the image in an archive.
func tagOf(archive string) (name.Tag, error) {
	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(archive) })
	if err != nil {
		return name.Tag{}, fmt.Errorf("image archive %s: %w", archive, err)
	}
	if len(manifest) != 1 || len(manifest[0].RepoTags) != 1 {
		return name.Tag{}, fmt.Errorf("image archive %s: must hold one image with one name", archive)
	}
	return name.NewTag(manifest[0].RepoTags[0])
}

// short is an image's name without the registry: what kind loads has none.
func short(t name.Tag) string { return t.RepositoryStr() }

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// waitUsable waits for what "kind create cluster" does not wait for: a node is
// ready before its cluster can resolve names or make pods.
func waitUsable(ctx context.Context, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	return poll(ctx, func(ctx context.Context) error {
		if _, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default",
			metav1.GetOptions{}); err != nil {
			return err
		}
		dns, err := client.AppsV1().Deployments(metav1.NamespaceSystem).Get(ctx, "coredns", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range dns.Status.Conditions {
			if c.Type == appsv1.DeploymentAvailable && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return errors.New("coredns is not available")
	})
}
