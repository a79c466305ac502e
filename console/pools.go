package console

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
)

type poolRow struct {
	openapi.Pool
	State badge
	Why   string
}

// poolState is the state of a pool in a word, and why it is so.
func poolState(p *openapi.Pool) (badge, string) {
	if p.Deleting {
		return badge{"busy", "deleting"}, ""
	}
	if c := condition(p, "Degraded"); c != nil && c.Status == "True" {
		return badge{"bad", c.Reason}, c.Message
	}
	if c := condition(p, "Ready"); c != nil && c.Status != "True" {
		return badge{"busy", or(c.Reason, "not ready")}, c.Message
	}
	return badge{"ok", "ready"}, ""
}

func toRow(p *openapi.Pool) poolRow {
	row := poolRow{Pool: *p}
	row.State, row.Why = poolState(p)
	return row
}

func poolsPage(v *visit) (page, error) {
	pools, err := v.api.Pools(v.ctx)
	if err != nil {
		return page{}, err
	}
	rows := make([]poolRow, 0, len(pools))
	for i := range pools {
		rows = append(rows, toRow(&pools[i]))
	}
	return page{name: "pools", Title: "Pools", Section: "Pools", Live: true, Data: rows}, nil
}

type poolData struct {
	poolRow
	// Pods are those that are not ready. PodsProblem says why they are not known.
	Pods        []openapi.PodDiagnostics
	Failures    []openapi.PodFailure
	Others      int
	PodsProblem string
	// Scales: the person may change the size. Form has what was entered, and Errors the sentence for each field.
	Scales bool
	Form   map[string]string
	Errors map[string]string
}

func poolPage(v *visit) (page, error) { return v.pool(nil, nil) }

// pool shows a pool, with a form that was refused if there is one.
func (v *visit) pool(form, wrong map[string]string) (page, error) {
	name := v.PathValue("pool")
	var d poolData
	var pool *openapi.Pool
	all, ctx := errgroup.WithContext(v.ctx)
	all.Go(func() (err error) { pool, err = v.api.Pool(ctx, name); return err })
	all.Go(func() error {
		panel, cancel := panelOf(v.ctx)
		defer cancel()
		found, err := v.api.PoolDiagnostics(panel, name)
		if err != nil {
			d.PodsProblem = sentence("the pods cannot be read now: " + reasonOf(err))
			return nil
		}
		d.Pods, d.Others, d.Failures = found.Pods, found.PodsOthers, found.Failures
		return nil
	})
	if err := all.Wait(); err != nil {
		return page{}, err
	}
	d.poolRow, d.Scales, d.Form, d.Errors = toRow(pool), v.may(openapi.Admin), form, wrong
	p := page{name: "pool", Title: pool.Name, Section: "Pools", Live: true, Data: d}
	if form == nil {
		d.Form = map[string]string{
			"warm": strconv.Itoa(pool.Spec.Warm), "maxWarm": unless0(pool.Spec.MaxWarm), "maxPods": unless0(pool.Spec.MaxPods),
			"generation": strconv.FormatInt(pool.Generation, 10),
		}
		p.Data = d
	} else {
		p.status = http.StatusUnprocessableEntity
	}
	return p, nil
}

func unless0(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// scale changes the size of a pool.
func scale(v *visit) (page, error) {
	form, wrong := map[string]string{}, map[string]string{}
	number := func(name string, most int, empty bool) *int {
		form[name] = strings.TrimSpace(v.PostForm.Get(name))
		if form[name] == "" && empty {
			return new(int)
		}
		n, err := strconv.Atoi(form[name])
		if err != nil || n < 0 || n > most {
			wrong[name] = "Enter a whole number from 0 to " + strconv.Itoa(most) + "."
			return nil
		}
		return &n
	}
	var to openapi.ScalePoolJSONRequestBody
	to.Warm, to.MaxWarm = number("warm", 10_000, false), number("maxWarm", 10_000, true)
	to.MaxPods = number("maxPods", 100_000, true)
	form["generation"] = v.PostForm.Get("generation")
	generation, err := strconv.ParseInt(form["generation"], 10, 64)
	if err != nil || generation < 1 {
		wrong["all"] = "The form is not complete. Open the page again."
	}
	to.Generation = &generation
	if len(wrong) == 0 {
		if _, err := v.api.Scale(v.ctx, v.PathValue("pool"), to); err == nil {
			return v.redirect(base + "/pools/" + url.PathEscape(v.PathValue("pool")) + "?done=scaled")
		} else if client.IsRefused(err) || client.IsNotFound(err) {
			return page{}, err
		} else if wrong["all"] = sentence(reasonOf(err)); statusOf(err) == http.StatusConflict {
			wrong["all"] = "The pool was changed meanwhile. Open the page again, and look at the new values."
		}
	}
	return v.pool(form, wrong)
}
