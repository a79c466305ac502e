package processnode

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/devcluster/nodes"
)

func TestEnvironmentHasValuesAndFieldsOfThePod(t *testing.T) {
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "n", UID: "u"},
		Spec:       corev1.PodSpec{NodeName: "node"},
	}
	c := &corev1.Container{Env: []corev1.EnvVar{
		{Name: "PLAIN", Value: "a $value"},
		{Name: "IP", ValueFrom: field("status.podIP")},
		{Name: "HOST", ValueFrom: field("status.hostIP")},
		{Name: "NODE", ValueFrom: field("spec.nodeName")},
		{Name: "UID", ValueFrom: field("metadata.uid")},
		{Name: "NAME", ValueFrom: field("metadata.name")},
		{Name: "NAMESPACE", ValueFrom: field("metadata.namespace")},
	}}
	require.Equal(t, []string{
		"PLAIN=a $value", "IP=127.3.0.1", "HOST=" + nodes.HostIP, "NODE=node", "UID=u", "NAME=p", "NAMESPACE=n",
	}, environment(pod, c, "127.3.0.1"))
}
