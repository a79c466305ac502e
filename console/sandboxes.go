package console

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/api/openapi"
)

// listLength is how many sandboxes a page of the list has.
const listLength = 100

// sandboxRow has what a row shows and no more, because a template looks fields up by name.
type sandboxRow struct {
	ID, Path         string
	State            badge
	Live             bool
	Pool, Team, User string
	Claimed          time.Time
	// Used is the latest use of a live sandbox. End is its next end without further use, or when it was released, and
	// Why the reason. They may not be known.
	Used, End *time.Time
	Why       string
}

type sandboxesData struct {
	// Filter has what the person has entered, Error a sentence about it.
	Filter map[string]string
	Error  string
	Pools  []string
	Phases []choice
	Teams  bool // the person sees those of several teams
	Ends   bool // the person may end them
	Rows   []sandboxRow
	// Next and First are the addresses of pages, "" for none.
	Next, First string
}

type choice struct {
	Value, Name string
	Chosen      bool
}

// live are the phases of sandboxes that are not released.
var live = []openapi.RecordPhase{
	openapi.RecordPhaseStarting, openapi.RecordPhaseRunning,
	openapi.RecordPhaseFallingAsleep, openapi.RecordPhaseAsleep, openapi.RecordPhaseWaking, openapi.RecordPhaseStopped,
}

// phases are what can be chosen, and what the API calls it.
var phases = []struct {
	value, name string
	all         []openapi.RecordPhase
}{
	{"live", "Live", live},
	{"starting", "Starting", []openapi.RecordPhase{openapi.RecordPhaseStarting}},
	{"asleep", "Asleep", live[2:5]},
	{"stopped", "Stopped", []openapi.RecordPhase{openapi.RecordPhaseStopped}},
	{"released", "Being released", []openapi.RecordPhase{openapi.RecordPhaseReleased}},
	{"ended", "Ended", []openapi.RecordPhase{openapi.RecordPhaseEnded}},
	{"all", "All", append(slices.Clone(live), openapi.RecordPhaseReleased, openapi.RecordPhaseEnded)},
}

var stateOf = map[openapi.RecordPhase]badge{
	openapi.RecordPhaseStarting: {"busy", "starting"}, openapi.RecordPhaseRunning: {"ok", "running"},
	openapi.RecordPhaseFallingAsleep: {"busy", "falling asleep"}, openapi.RecordPhaseAsleep: {"still", "asleep"},
	openapi.RecordPhaseWaking: {"busy", "waking"}, openapi.RecordPhaseStopped: {"still", "stopped"},
	openapi.RecordPhaseReleased: {"busy", "being released"}, openapi.RecordPhaseEnded: {"still", "ended"},
}

func isLive(p openapi.RecordPhase) bool {
	return slices.Contains(live, p)
}

// filterFields are the parameters of the list.
var filterFields = []string{"id", "user", "metadata", "pool", "team", "phase"}

func sandboxesPage(v *visit) (page, error) {
	query := v.URL.Query()
	d := sandboxesData{
		Filter: map[string]string{}, Teams: v.may(openapi.Admin), Ends: v.may(openapi.Member),
	}
	kept := url.Values{}
	for _, name := range filterFields {
		if text := strings.TrimSpace(query.Get(name)); text != "" {
			d.Filter[name] = text
			kept.Set(name, text)
		}
	}
	if d.Filter["phase"] == "" && d.Filter["id"] != "" {
		d.Filter["phase"] = "all" // an ID may be that of a sandbox that has ended
	}
	filter := d.filter(query.Get("after"))
	var pools []openapi.Pool
	found := &openapi.SandboxRecords{}
	all, ctx := errgroup.WithContext(v.ctx)
	all.Go(func() (err error) { pools, err = v.api.Pools(ctx); return err })
	all.Go(func() error {
		answer, err := v.api.FindPage(ctx, filter)
		switch {
		case err == nil:
			found = answer
		case statusOf(err) == http.StatusBadRequest:
			d.Error = sentence(reasonOf(err))
		default:
			return err
		}
		return nil
	})
	if err := all.Wait(); err != nil {
		return page{}, err
	}
	for i := range pools {
		d.Pools = append(d.Pools, pools[i].Name)
	}
	d.Rows = v.rows(found.Sandboxes)
	if query.Get("after") != "" {
		d.First = base + "/sandboxes?" + kept.Encode()
	}
	if found.NextToken != "" {
		kept.Set("after", found.NextToken)
		d.Next = base + "/sandboxes?" + kept.Encode()
	}
	return page{name: "sandboxes", Title: "Sandboxes", Section: "Sandboxes", Live: true, Data: d}, nil
}

// filter returns what the API is asked for.
func (d *sandboxesData) filter(after string) openapi.FindSandboxesParams {
	text := func(name string) *string {
		if d.Filter[name] == "" {
			return nil
		}
		return new(d.Filter[name])
	}
	f := openapi.FindSandboxesParams{
		Team: text("team"), User: text("user"), Pool: text("pool"), Prefix: text("id"), Limit: new(listLength),
	}
	if after != "" {
		f.NextToken = &after
	}
	if entered := d.Filter["metadata"]; entered != "" {
		values := url.Values{}
		for _, pair := range strings.Fields(entered) {
			key, value, _ := strings.Cut(pair, "=")
			values.Set(url.QueryEscape(key), url.QueryEscape(value))
		}
		f.Metadata = new(values.Encode())
	}
	phase := or(d.Filter["phase"], "live")
	for _, p := range phases {
		d.Phases = append(d.Phases, choice{p.value, p.name, p.value == phase})
		if p.value == phase {
			f.Phase = p.all
		}
	}
	return f
}

// rows are the rows of a list, with what is known of the use of live sandboxes.
func (v *visit) rows(records []openapi.SandboxRecord) []sandboxRow {
	rows := make([]sandboxRow, 0, len(records))
	var live []string
	for _, r := range records {
		row := sandboxRow{
			ID: r.SandboxID, Path: base + "/sandboxes/" + url.PathEscape(r.SandboxID), State: stateOf[r.Phase],
			Live: isLive(r.Phase), Pool: r.Pool, Team: r.Team, User: r.User, Claimed: r.ClaimedAt,
		}
		if row.Live {
			live = append(live, r.SandboxID)
		} else {
			row.End, row.Why = r.ReleasedAt, words(r.Reason)
		}
		rows = append(rows, row)
	}
	if len(live) == 0 {
		return rows
	}
	ctx, cancel := panelOf(v.ctx)
	defer cancel()
	used, err := v.api.LastActive(ctx, openapi.LastActiveParams{Ids: live})
	if err != nil {
		return rows // the page is of use without it
	}
	byID := map[string]*openapi.Activity{}
	for i := range used.Sandboxes {
		byID[used.Sandboxes[i].SandboxID] = &used.Sandboxes[i]
	}
	for i := range rows {
		a := byID[rows[i].ID]
		if a == nil {
			continue
		}
		if rows[i].Used = &a.LastActive; a.Next != nil {
			rows[i].End, rows[i].Why = &a.Next.At, words(string(a.Next.Reason))
		}
	}
	return rows
}
