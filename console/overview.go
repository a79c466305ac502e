package console

import (
	"fmt"
	"html/template"
	"net/url"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/console/chart"
)

// card is a number of the overview.
type card struct {
	Name, Value, Note, Path string
	Kind                    string // "", or bad: it needs attention
}

// problem is something that an operator should look at.
type problem struct{ What, Name, Why, Path string }

// event is a row of a list of events.
type event struct {
	At            time.Time
	What          badge
	ID, Pool, Why string
	Team          string
}

type overviewData struct {
	Cards         []card
	Problems      []problem
	Events        []event
	EventsProblem string
	// Charts are those of the last hour, for operators. ChartsProblem is why there are none.
	Charts        []template.HTML
	ChartsProblem string
}

// overviewEvents is how many events the overview has.
const overviewEvents = 15

func overview(v *visit) (page, error) {
	var d overviewData
	var pools []openapi.Pool
	var sessions *openapi.Sessions
	var fences *openapi.Fences
	all, ctx := errgroup.WithContext(v.ctx)
	all.Go(func() (err error) { pools, err = v.api.Pools(ctx); return err })
	all.Go(func() error { d.Events, d.EventsProblem = v.latest("", overviewEvents); return nil })
	if v.may(openapi.Admin) {
		all.Go(func() (err error) { sessions, err = v.api.Sessions(ctx, listed); return err })
		all.Go(func() (err error) { fences, err = v.api.Fences(ctx, 1); return err })
		all.Go(func() error { d.Charts, d.ChartsProblem = v.charts(); return nil })
	}
	if err := all.Wait(); err != nil {
		return page{}, err
	}
	d.Cards, d.Problems = poolCards(pools)
	if sessions != nil {
		d.Cards = append(d.Cards, routersCard(sessions), fencesCard(fences))
	}
	return page{name: "overview", Title: "Overview", Section: "Overview", Live: true, Data: d}, nil
}

// charts draws what happened in the last hour, or says why it does not.
func (v *visit) charts() (all []template.HTML, problem string) {
	ctx, cancel := panelOf(v.ctx)
	defer cancel()
	h, err := v.api.History(ctx)
	if err != nil {
		return nil, sentence("the last hour is not known now: " + reasonOf(err))
	}
	if all, err = drawn(chart.Of(h, v.c.o.Now())); err != nil {
		return nil, sentence("the last hour cannot be drawn: " + err.Error())
	}
	return all, ""
}

// drawn returns charts as parts of a page.
func drawn(charts []chart.Chart) (all []template.HTML, err error) {
	for i := range charts {
		var out strings.Builder
		if err := charts[i].Draw(&out); err != nil {
			return nil, err
		}
		all = append(all, template.HTML(out.String())) //nolint:gosec // html/template has made it
	}
	return all, nil
}

// poolCards are the sums over all pools.
func poolCards(pools []openapi.Pool) (cards []card, problems []problem) {
	var n openapi.PoolCounts
	for i := range pools {
		p := &pools[i]
		n.Warm, n.Pending, n.Claimed = n.Warm+p.Counts.Warm, n.Pending+p.Counts.Pending, n.Claimed+p.Counts.Claimed
		n.Releasing, n.WaitingClaims = n.Releasing+p.Counts.Releasing, n.WaitingClaims+p.Counts.WaitingClaims
		if c := condition(p, "Degraded"); c != nil && c.Status == "True" {
			problems = append(problems, problem{c.Reason, p.Name, c.Message, base + "/pools/" + url.PathEscape(p.Name)})
		}
	}
	waiting := card{Name: "Waiting claims", Value: fmt.Sprint(n.WaitingClaims), Path: base + "/pools"}
	if n.WaitingClaims > 0 {
		waiting.Kind = "bad"
	}
	return []card{
		{Name: "Live sandboxes", Value: fmt.Sprint(n.Claimed), Path: base + "/sandboxes"},
		{Name: "Warm pods", Value: fmt.Sprint(n.Warm), Note: plural(len(pools), "pool"), Path: base + "/pools"},
		{Name: "Starting pods", Value: fmt.Sprint(n.Pending), Path: base + "/pools"},
		{Name: "Releasing", Value: fmt.Sprint(n.Releasing), Path: base + "/sandboxes?phase=released"},
		waiting,
	}, problems
}

func routersCard(s *openapi.Sessions) card {
	connected := 0
	for _, one := range s.Sessions {
		if one.Connected {
			connected++
		}
	}
	c := card{Name: "Routers", Value: fmt.Sprint(connected), Note: "connected", Path: base + "/routers"}
	if away := len(s.Sessions) - connected; away > 0 {
		c.Note, c.Kind = fmt.Sprintf("connected, %d away", away), "bad"
	}
	return c
}

func fencesCard(f *openapi.Fences) card {
	kept := len(f.Fences) + f.Truncated
	return card{Name: "Fences", Value: fmt.Sprint(kept), Note: "pods kept", Path: base + "/fences"}
}

func condition(p *openapi.Pool, kind string) *openapi.Condition {
	for i := range p.Conditions {
		if p.Conditions[i].Type == kind {
			return &p.Conditions[i]
		}
	}
	return nil
}

func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// listed is the length of the lists of routers and fences.
const listed = 100

// kindsOfEvents are the words for events.
var kindsOfEvents = map[openapi.EventType]badge{
	openapi.SandboxLifecycleCreated: {"ok", "claimed"},
	openapi.SandboxLifecycleUpdated: {"busy", "end moved"},
	openapi.SandboxLifecycleKilled:  {"still", "released"},
}

// latest returns events of the log, of one sandbox or of all that the person sees, the newest first. It may return why
// there are none.
func (v *visit) latest(id string, most int) (rows []event, problem string) {
	log, err := v.api.EventLog(v.ctx, id, most)
	if err != nil {
		return nil, sentence("the events cannot be read now: " + reasonOf(err))
	}
	for i := range log {
		e := &log[i]
		row := event{
			At: e.Timestamp, What: kindsOfEvents[e.Type], ID: e.SandboxID, Pool: e.SandboxTemplateID, Team: e.SandboxTeamID,
		}
		switch {
		case e.EventData.Reason != nil:
			row.Why = *e.EventData.Reason
		case e.EventData.SetTimeout != nil:
			row.Why = "ends " + stamp(*e.EventData.SetTimeout)
		}
		rows = append(rows, row)
	}
	return rows, ""
}
