package rest

import (
	"math"
	"net/http"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// resourcesOf returns what a pool limits a pod to: CPUs, MiB of memory and MiB of ephemeral
// storage. 0: a container has no limit.
func resourcesOf(pool *v1alpha1.SandboxPool) (cpus, memory, disk int) {
	sum := func(name corev1.ResourceName, unit float64) int { return int(math.Ceil(limitOf(pool, name) / unit)) }
	return sum(corev1.ResourceCPU, 1), sum(corev1.ResourceMemory, 1<<20), sum(corev1.ResourceEphemeralStorage, 1<<20)
}

// limitOf returns what a pool limits a pod to. 0: a container has no limit.
func limitOf(pool *v1alpha1.SandboxPool, name corev1.ResourceName) (all float64) {
	for i := range pool.Spec.Template.Spec.Containers {
		limit, ok := pool.Spec.Template.Spec.Containers[i].Resources.Limits[name]
		if !ok {
			return 0
		}
		all += limit.AsApproximateFloat64()
	}
	return all
}

func toTemplate(pool *v1alpha1.SandboxPool) openapi.Template {
	shown := openapi.Template{
		TemplateID: pool.Name, BuildID: string(pool.UID), Aliases: []string{pool.Name}, Names: []string{pool.Name},
		CreatedAt: pool.CreationTimestamp.UTC(), UpdatedAt: pool.CreationTimestamp.UTC(), BuildCount: 1,
		EnvdVersion: agentVersionOf(pool), BuildStatus: openapi.TemplateBuildStatusReady,
	}
	shown.CPUCount, shown.MemoryMB, shown.DiskSizeMB = resourcesOf(pool)
	if pool.Status.TemplateRefused() {
		shown.BuildStatus = openapi.TemplateBuildStatusError
	}
	return shown
}

func (a *api) listTemplates(w *reply, _ *http.Request) error {
	all := []openapi.Template{}
	for _, pool := range a.Allocator.Pools() {
		all = append(all, toTemplate(pool))
	}
	return writeJSON(w, http.StatusOK, all)
}

func (a *api) getTemplateByAlias(w *reply, r *http.Request) error {
	pool, ok := a.Allocator.Pool(r.PathValue("alias"))
	if !ok {
		return noPool(r.PathValue("alias"))
	}
	return writeJSON(w, http.StatusOK, openapi.TemplateAlias{TemplateID: pool.Name})
}

// defaultTeam is the name of the team of an API without keys.
const defaultTeam = "default"

func (a *api) listTeams(w *reply, r *http.Request) error {
	name := access.From(r.Context()).Team
	if name == "" {
		name = defaultTeam
	}
	return writeJSON(w, http.StatusOK, []openapi.Team{{TeamID: name, Name: name, IsDefault: true}})
}
