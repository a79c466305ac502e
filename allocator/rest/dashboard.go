package rest

import (
	"cmp"
	"net/http"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// none is a list without entries in JSON.
var none = []string{}

// answering returns a call that always has one answer.
func answering(v any) func(*reply, *http.Request) error {
	return func(w *reply, _ *http.Request) error { return writeJSON(w, http.StatusOK, v) }
}

// ofPool lets calls through whose templateID is a pool.
func (a *api) ofPool(next func(*reply, *http.Request) error) func(*reply, *http.Request) error {
	return func(w *reply, r *http.Request) error {
		if _, ok := a.Allocator.Pool(r.PathValue("templateID")); !ok {
			return noPool(r.PathValue("templateID"))
		}
		return next(w, r)
	}
}

func tagExists(w *reply, r *http.Request) error {
	return writeJSON(w, http.StatusOK, map[string]any{"exists": false, "normalizedTag": r.URL.Query().Get("tag")})
}

func noBuild(_ *reply, r *http.Request) error {
	return apierror.New(apierror.NotFound, "there is no build %q: Berth builds no images", r.PathValue("buildID"))
}

func toDashboardTemplate(pool *v1alpha1.SandboxPool) openapi.DashboardTemplate {
	t := toTemplate(pool)
	return openapi.DashboardTemplate{
		TemplateID: t.TemplateID, BuildID: t.BuildID, CPUCount: t.CPUCount, MemoryMB: t.MemoryMB, DiskSizeMB: t.DiskSizeMB,
		Aliases: t.Aliases, Names: t.Names, CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt, BuildCount: t.BuildCount, EnvdVersion: t.EnvdVersion,
	}
}

func (a *api) dashboardTemplate(w *reply, r *http.Request) error {
	pool, ok := a.Allocator.Pool(r.PathValue("templateID"))
	if !ok {
		return noPool(r.PathValue("templateID"))
	}
	return writeJSON(w, http.StatusOK, toDashboardTemplate(pool))
}

// dashboardTemplates answers with a page of pools by the time of their creation, and by name for those of one time. The
// cursor is the name of the last pool of the page before.
func (a *api) dashboardTemplates(w *reply, r *http.Request) error {
	query := r.URL.Query()
	limit, err := number(query, "limit", 50)
	if err != nil {
		return err
	}
	pools := slices.Clone(a.Allocator.Pools())
	descending := !strings.HasSuffix(query.Get("sort"), "_asc")
	slices.SortFunc(pools, func(p, q *v1alpha1.SandboxPool) int {
		order := cmp.Or(p.CreationTimestamp.Compare(q.CreationTimestamp.Time), strings.Compare(p.Name, q.Name))
		if descending {
			order = -order
		}
		return order
	})
	if cursor := query.Get("cursor"); cursor != "" {
		i := slices.IndexFunc(pools, func(p *v1alpha1.SandboxPool) bool { return p.Name == cursor })
		if i < 0 {
			return invalid("cursor: %q: the pool at which the page before ended is gone, or this is no nextCursor; begin with the first page", cursor)
		}
		pools = pools[i+1:]
	}
	page := openapi.DashboardTemplates{Data: []openapi.DashboardTemplate{}}
	search := strings.ToLower(query.Get("search"))
	for _, pool := range pools {
		switch {
		case query.Get("public") == "true" || !strings.Contains(strings.ToLower(pool.Name), search):
		case len(page.Data) == limit:
			last := page.Data[limit-1].TemplateID
			page.NextCursor = &last
			return writeJSON(w, http.StatusOK, page)
		default:
			page.Data = append(page.Data, toDashboardTemplate(pool))
		}
	}
	return writeJSON(w, http.StatusOK, page)
}
