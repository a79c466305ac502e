package rest

import (
	"cmp"
	"net/http"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/webhooks"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// webhooksOf returns the webhooks of this term, and what the caller sees of them.
func (a *api) webhooksOf(r *http.Request) (*webhooks.Manager, webhooks.Scope, error) {
	caller := access.From(r.Context())
	m, err := a.Allocator.Webhooks()
	return m, webhooks.Scope{All: caller.Role == access.Admin, Team: caller.Team}, err
}

func toWebhook(o *v1alpha1.EventWebhook) openapi.Webhook {
	shown := openapi.Webhook{
		ID: o.Name, TeamID: cmp.Or(o.Spec.Team, defaultTeam), Name: o.Spec.Name, CreatedAt: o.CreationTimestamp.UTC(), URL: o.Spec.URL,
		Enabled: o.Spec.Enabled, Events: []openapi.EventType{},
	}
	for _, t := range o.Spec.Events {
		shown.Events = append(shown.Events, openapi.EventType(t))
	}
	return shown
}

func (a *api) listWebhooks(w *reply, r *http.Request) error {
	m, scope, err := a.webhooksOf(r)
	if err != nil {
		return err
	}
	all, err := m.List(scope)
	if err != nil {
		return err
	}
	shown := make([]openapi.Webhook, 0, len(all))
	for _, o := range all {
		shown = append(shown, toWebhook(o))
	}
	return writeJSON(w, http.StatusOK, shown)
}

func (a *api) getWebhook(w *reply, r *http.Request) error {
	m, scope, err := a.webhooksOf(r)
	if err != nil {
		return err
	}
	o, err := m.Get(scope, r.PathValue("webhookID"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, toWebhook(o))
}

// changeOf reads a NewWebhook or a WebhookChange, which was checked against its schema.
func changeOf(r *http.Request) (c webhooks.Change, err error) {
	var body openapi.WebhookChange
	if err := decodeBody(r, &body); err != nil {
		return c, err
	}
	c = webhooks.Change{Name: body.Name, URL: body.URL, Secret: body.SignatureSecret, Enabled: body.Enabled}
	for _, t := range body.Events {
		c.Events = append(c.Events, string(t))
	}
	return c, nil
}

func (a *api) createWebhook(w *reply, r *http.Request) error {
	m, _, err := a.webhooksOf(r)
	if err != nil {
		return err
	}
	c, err := changeOf(r)
	if err != nil {
		return err
	}
	if c.Enabled == nil {
		enabled := true
		c.Enabled = &enabled
	}
	o, err := m.Create(r.Context(), access.From(r.Context()).Team, c)
	if err != nil {
		return err
	}
	w.object = o.Name
	return writeJSON(w, http.StatusCreated, toWebhook(o))
}

func (a *api) updateWebhook(w *reply, r *http.Request) error {
	m, scope, err := a.webhooksOf(r)
	if err != nil {
		return err
	}
	c, err := changeOf(r)
	if err != nil {
		return err
	}
	o, err := m.Update(r.Context(), scope, r.PathValue("webhookID"), c)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, toWebhook(o))
}

func (a *api) deleteWebhook(w *reply, r *http.Request) error {
	m, scope, err := a.webhooksOf(r)
	if err != nil {
		return err
	}
	if err := m.Delete(r.Context(), scope, r.PathValue("webhookID")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

func (a *api) listDeliveries(w *reply, r *http.Request) error {
	m, scope, err := a.webhooksOf(r)
	if err != nil {
		return err
	}
	limit, err := decodeLimit(r, defaultPage)
	if err != nil {
		return err
	}
	all, err := m.Deliveries(scope, r.PathValue("webhookID"), limit)
	if err != nil {
		return err
	}
	if all == nil {
		all = []openapi.WebhookDelivery{}
	}
	return writeJSON(w, http.StatusOK, all)
}
