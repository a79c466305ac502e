package devcluster

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// installCRDs creates the CustomResourceDefinitions of Options.CRDs, one per file, and
// returns when every version they serve answers.
func (c *Cluster) installCRDs(ctx context.Context) error {
	client, err := dynamic.NewForConfig(c.config)
	if err != nil {
		return fmt.Errorf("client for CRDs: %w", err)
	}
	crds := client.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
		Resource: "customresourcedefinitions"})
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit, fmt.Errorf("it took longer than %v", readyLimit))
	defer cancel()
	for i, file := range c.o.CRDs {
		crd := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(file, &crd.Object); err != nil {
			return fmt.Errorf("read CRD file %d: %w", i, err)
		}
		if _, err := crds.Create(ctx, crd, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("install CRD %s: %w", crd.GetName(), err)
		}
		c.served = append(c.served, servedBy(crd)...)
	}
	for _, gvr := range c.served {
		var last error
		if err := wait.PollUntilContextCancel(ctx, readyPoll, true, func(ctx context.Context) (bool, error) {
			_, last = client.Resource(gvr).List(ctx, metav1.ListOptions{Limit: 1})
			return last == nil, nil
		}); err != nil {
			return fmt.Errorf("%v is not served: %w (last answer: %w)", gvr, context.Cause(ctx), last)
		}
	}
	return nil
}

func servedBy(crd *unstructured.Unstructured) (served []schema.GroupVersionResource) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		if version, ok := v.(map[string]any); ok && version["served"] == true {
			name, _ := version["name"].(string)
			served = append(served, schema.GroupVersionResource{Group: group, Version: name, Resource: plural})
		}
	}
	return served
}
