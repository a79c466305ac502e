package processnode

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/devcluster/nodes"
)

func TestVariablesAreExpandedAsInKubernetes(t *testing.T) {
	env := map[string]string{"A": "a", "EMPTY": "", "REF": "$(A)"}
	for in, want := range map[string]string{ // third_party/forked/golang/expansion
		"":            "",
		"plain":       "plain",
		"$(A)":        "a",
		"x$(A)y$(A)":  "xaya",
		"$(EMPTY)":    "",
		"$(NONE)":     "$(NONE)",
		"$$(A)":       "$(A)",
		"$$$(A)":      "$a",
		"$$$$(A)":     "$$(A)",
		"$A":          "$A",
		"$":           "$",
		"a$":          "a$",
		"$(A":         "$(A",
		"$(REF)":      "$(A)", // once, not again
		"$(A)$(NONE)": "a$(NONE)",
		"$()":         "$()",
		"-$(A)-$x$(":  "-a-$x$(",
	} {
		require.Equal(t, want, expand(in, env), "%q", in)
	}
}

func TestLaterVariablesSeeEarlierOnesOnly(t *testing.T) {
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "n", UID: "u"},
		Spec:       corev1.PodSpec{NodeName: "node"},
	}
	c := &corev1.Container{Env: []corev1.EnvVar{
		{Name: "EARLY", Value: "$(IP)"},
		{Name: "IP", ValueFrom: field("status.podIP")},
		{Name: "HOST", ValueFrom: field("status.hostIP")},
		{Name: "NODE", ValueFrom: field("spec.nodeName")},
		{Name: "UID", ValueFrom: field("metadata.uid")},
		{Name: "NAME", ValueFrom: field("metadata.name")},
		{Name: "URL", Value: "http://$(IP):80"},
	}}
	require.Equal(t, map[string]string{
		"EARLY": "$(IP)", "IP": "127.3.0.1", "HOST": nodes.HostIP, "NODE": "node", "UID": "u", "NAME": "p",
		"URL": "http://127.3.0.1:80",
	}, environment(pod, c, "127.3.0.1"))
}
