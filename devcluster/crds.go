package devcluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// servedLimit bounds the wait for a new resource; it takes about 0.2 s.
const servedLimit = time.Minute

// installCRDs creates or updates the CustomResourceDefinitions in the YAML
// documents and returns when every version they serve answers.
func installCRDs(ctx context.Context, client dynamic.Interface, files [][]byte) error {
	crds, err := decodeCRDs(files)
	if err != nil {
		return err
	}
	resource := client.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
		Resource: "customresourcedefinitions"})
	for _, crd := range crds {
		_, err := resource.Create(ctx, crd, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			var old *unstructured.Unstructured
			if old, err = resource.Get(ctx, crd.GetName(), metav1.GetOptions{}); err == nil {
				crd.SetResourceVersion(old.GetResourceVersion())
				_, err = resource.Update(ctx, crd, metav1.UpdateOptions{})
			}
		}
		if err != nil {
			return fmt.Errorf("install CRD %s: %w", crd.GetName(), err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, servedLimit, fmt.Errorf("it took longer than %v", servedLimit))
	defer cancel()
	for _, crd := range crds {
		for _, gvr := range servedBy(crd) {
			if err := awaitServed(ctx, client, gvr); err != nil {
				return fmt.Errorf("CRD %s is not served: %w", crd.GetName(), err)
			}
		}
	}
	return nil
}

func decodeCRDs(files [][]byte) ([]*unstructured.Unstructured, error) {
	var crds []*unstructured.Unstructured
	for i, file := range files {
		docs := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(file)))
		for {
			doc, err := docs.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("read CRD file %d: %w", i, err)
			}
			crd := &unstructured.Unstructured{}
			if err := yaml.Unmarshal(doc, &crd.Object); err != nil {
				return nil, fmt.Errorf("read CRD file %d: %w", i, err)
			}
			if len(crd.Object) == 0 {
				continue // only comments
			}
			if crd.GetKind() != "CustomResourceDefinition" {
				return nil, fmt.Errorf("read CRD file %d: it holds a %q, want only CustomResourceDefinition", i, crd.GetKind())
			}
			crds = append(crds, crd)
		}
	}
	return crds, nil
}

func servedBy(crd *unstructured.Unstructured) (served []schema.GroupVersionResource) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		version, ok := v.(map[string]any)
		if !ok || version["served"] != true {
			continue
		}
		name, _, _ := unstructured.NestedString(version, "name")
		served = append(served, schema.GroupVersionResource{Group: group, Version: name, Resource: plural})
	}
	return served
}

func awaitServed(ctx context.Context, client dynamic.Interface, gvr schema.GroupVersionResource) error {
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		_, err := client.Resource(gvr).List(ctx, metav1.ListOptions{Limit: 1})
		if err == nil {
			return nil
		}
		if !apierrors.IsNotFound(err) && !apierrors.IsServiceUnavailable(err) && !apierrors.IsTooManyRequests(err) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w (last answer: %w)", context.Cause(ctx), err)
		}
	}
}
