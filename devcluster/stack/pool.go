package stack

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// DemoPorts are the ports that the program in a DemoPool's pods listens on. The
// first is the default port.
func DemoPorts() []int32 { return []int32{8080, 8081} }

// DemoPool is a pool of pods that say who they are.
func DemoPool(namespace, name string, warm int32) *v1alpha1.SandboxPool {
	ports := DemoPorts()
	grace := int64(2)
	return &v1alpha1.SandboxPool{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPool"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1alpha1.SandboxPoolSpec{
			Warm: warm, DefaultPort: ports[0],
			Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{
				TerminationGracePeriodSeconds: &grace,
				Containers: []corev1.Container{{
					Name: "sandbox", Image: "berth.sh/demo-sandbox:dev",
					Command: []string{"demo-sandbox"},
					Args:    []string{fmt.Sprintf("--ports=%d,%d", ports[0], ports[1])},
					Env: []corev1.EnvVar{fromField("POD_IP", "status.podIP"), fromField("POD_NAME", "metadata.name"),
						fromField("POD_UID", "metadata.uid")},
					ReadinessProbe: &corev1.Probe{
						ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/readyz",
							Port: intstr.FromInt32(ports[0])}},
						PeriodSeconds: 1,
					},
				}},
			}},
		},
	}
}

// fromField is a variable with the value of a field of the pod.
func fromField(name, path string) corev1.EnvVar {
	ref := &corev1.ObjectFieldSelector{FieldPath: path}
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: ref}}
}
