package rest

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/version"
)

// action is how an operation is carried out.
type action struct {
	class *class
	f     func(*reply, *http.Request) error
	// large: the answer of a claim may be larger than smallAnswer.
	large bool
	// again: the call may be repeated if its outcome is unknown. Calls with GET, and claims with a key, always may.
	again bool
	// stream is set instead for an answer without an end.
	stream func(http.ResponseWriter, *http.Request) error
	// open is set instead for a call that needs no key and is answered by every replica.
	open http.HandlerFunc
}

// actions are those of all operations, by ID.
func (a *api) actions() map[string]action {
	return map[string]action{
		"createSandbox":         {class: a.claims, f: a.create},
		"claimBatch":            {class: a.claims, f: a.claimBatch, large: true},
		"listSandboxes":         {class: a.others, f: a.list},
		"getSandbox":            {class: a.others, f: a.get},
		killOperation:           {class: a.others, f: a.kill, again: true},
		"connectSandbox":        {class: a.wakes, f: a.connect, again: true},
		"resumeSandbox":         {class: a.wakes, f: a.resume, again: true},
		"pauseSandbox":          {class: a.sleeps, f: a.pause},
		"createSnapshot":        {class: a.snapshots, f: a.createSnapshot},
		"listSnapshots":         {class: a.slow, f: a.listSnapshots},
		"deleteSnapshot":        {class: a.slow, f: a.deleteSnapshot, again: true},
		"setTimeout":            {class: a.others, f: a.setTimeout, again: true},
		"updateNetwork":         {class: a.networks, f: a.setNetwork, again: true},
		"refreshSandbox":        {class: a.others, f: a.refresh, again: true},
		"listTemplates":         {class: a.others, f: a.listTemplates},
		"getTemplateByAlias":    {class: a.others, f: a.getTemplateByAlias},
		"listTeams":             {class: a.others, f: a.listTeams},
		"getCaller":             {class: a.others, f: a.getCaller},
		"listTeamStatuses":      {class: a.others, f: a.listTeamStatuses},
		"listPools":             {class: a.others, f: a.listPools},
		"getPool":               {class: a.others, f: a.getPool},
		"scalePool":             {class: a.slow, f: a.scale},
		"findSandboxes":         {class: a.others, f: a.find},
		"explainSandbox":        {class: a.others, f: a.explain},
		"diagnoseSandbox":       {class: a.slow, f: a.diagnose},
		"diagnosePool":          {class: a.slow, f: a.diagnosePool},
		"getSandboxMetrics":     {class: a.slow, f: a.metrics},
		"getMetricsOfSandboxes": {class: a.slow, f: a.metricsOfAll},
		"getSandboxLogs":        {class: a.slow, f: a.logs},
		"getSandboxLogsV2":      {class: a.slow, f: a.logsV2},
		"explainRoute":          {class: a.others, f: a.explainRoute},
		"keepAlive":             {class: a.others, f: a.keepAlive, again: true},
		"makeLink":              {class: a.others, f: a.makeLink, again: true},
		streamOperation:         {stream: a.sendEvents},
		"listEvents":            {class: a.others, f: a.listEvents},
		"listEventsOfSandbox":   {class: a.others, f: a.listEvents},
		"listWebhooks":          {class: a.others, f: a.listWebhooks},
		"createWebhook":         {class: a.slow, f: a.createWebhook},
		"getWebhook":            {class: a.others, f: a.getWebhook},
		"updateWebhook":         {class: a.slow, f: a.updateWebhook, again: true},
		"deleteWebhook":         {class: a.slow, f: a.deleteWebhook},
		"listDeliveries":        {class: a.others, f: a.listDeliveries},
		"lastActive":            {class: a.others, f: a.lastActive},
		"getHistory":            {class: a.others, f: a.history},
		"listFences":            {class: a.others, f: a.fences},
		"listSessions":          {class: a.others, f: a.sessions},
		"declareDead":           {class: a.others, f: a.declareDead},
		"health":                {open: a.health},

		"listDashboardTemplates": {class: a.others, f: a.dashboardTemplates},
		"getDashboardTemplate":   {class: a.others, f: a.dashboardTemplate},
		"listDefaultTemplates":   {class: a.others, f: answering(map[string]any{"templates": none})},
		"listTagGroups":          {class: a.others, f: a.ofPool(answering(map[string]any{"tags": none, "nextCursor": nil}))},
		"countTags":              {class: a.others, f: a.ofPool(answering(map[string]any{"total": 0}))},
		"tagExists":              {class: a.others, f: a.ofPool(tagExists)},
		"listTagAssignments":     {class: a.others, f: a.ofPool(answering(map[string]any{"data": none, "nextCursor": nil}))},
		"listBuilds":             {class: a.others, f: answering(map[string]any{"data": none, "nextCursor": nil})},
		"listBuildStatuses":      {class: a.others, f: answering(map[string]any{"buildStatuses": none})},
		"getBuild":               {class: a.others, f: noBuild},
	}
}

// routes returns a handler of the document's operations. An operation that is not in the document
// gets 404, another method of a path 405.
func (a *api) routes(document *openapi.Document) (*http.ServeMux, error) {
	actions, mux, paths := a.actions(), http.NewServeMux(), http.NewServeMux()
	methods := map[string][]string{} // by path
	for _, o := range document.Operations {
		handler := refusing(apierror.NotImplemented, o.Refused)
		if c, ok := actions[o.ID]; ok && c.open != nil {
			handler = c.open
			delete(actions, o.ID)
		} else if ok {
			role, err := access.ParseRole(o.Role)
			if err != nil {
				return nil, fmt.Errorf("rest: x-berth-role of operation %s of the OpenAPI document: %w", o.ID, err)
			}
			if handler = a.handle(c, &o); c.stream != nil {
				handler = a.stream(&o, c.stream)
			}
			handler = a.permitted(&o, role, handler)
			delete(actions, o.ID)
		} else if o.Refused == "" {
			return nil, fmt.Errorf("rest: operation %s of the OpenAPI document has no handler", o.ID)
		}
		for _, path := range o.Paths {
			mux.HandleFunc(o.Method+" "+path, handler)
			a.operations[o.Method+" "+path] = o.ID
			methods[path] = append(methods[path], o.Method)
		}
	}
	for id := range actions {
		return nil, fmt.Errorf("rest: operation %s is not in the OpenAPI document", id)
	}
	for path := range methods {
		slices.Sort(methods[path])
		paths.HandleFunc(path, func(http.ResponseWriter, *http.Request) {})
	}
	mux.HandleFunc("GET /openapi.json", constant("application/json", document.JSON))
	mux.HandleFunc("GET /openapi.yaml", constant("application/yaml", openapi.YAML))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if _, path := paths.Handler(r); path != "" {
			w.Header().Set("Allow", strings.Join(methods[path], ", "))
			refuse(w, r, apierror.New(apierror.MethodRefused, "%s: not a method of %s; it has %s", r.Method, path, strings.Join(methods[path], ", ")))
			return
		}
		refuse(w, r, apierror.New(apierror.NotFound, "%s: no such path; /openapi.json lists all", r.URL.Path))
	})
	return mux, nil
}

// isHealthPath reports whether a path is of the operation health, which needs no key, for load balancers.
func isHealthPath(path string) bool { return path == "/health" || path == "/dashboard/health" }

// health answers 200 while this replica leads or knows the leader, and says which version it is. It is never held. E2B's
// dashboard reads the message.
func (a *api) health(w http.ResponseWriter, r *http.Request) {
	if a.Allocator.Serving().Err() != nil {
		answer(w, r, apierror.New(apierror.NotLeader, "this replica is shutting down; try again"))
		return
	}
	if l := a.Allocator.Leader(); !l.Here && l.Address == "" {
		answer(w, r, apierror.New(apierror.NotLeader, "this replica does not lead, and no leader is known yet; try again"))
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	constant("application/json", []byte(`{"status":"ok","message":"ok","version":"`+version.Number+`"}`))(w, r)
}

// refusing answers every request with an error.
func refusing(reason apierror.Reason, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { refuse(w, r, apierror.New(reason, "%s", message)) }
}

func constant(contentType string, body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(body) // the client may have gone
	}
}
