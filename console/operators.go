package console

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
)

// advice says what ends the wait of a fence for a router, and what an operator can do.
func advice(s openapi.AwaitedSession) string {
	if s.Connected {
		return "It acknowledges when its Envoy has read its answers: within seconds. If not, look at the log of this router."
	}
	return fmt.Sprintf("It comes back, or its session expires in %s. If the router has ended together with its Envoy, "+
		"declare it dead on the page of routers.", span(time.Duration(s.ExpiresInSeconds*float64(time.Second))))
}

func routersPage(v *visit) (page, error) {
	if err := v.needs(openapi.Admin); err != nil {
		return page{}, err
	}
	sessions, err := v.api.Sessions(v.ctx, listed)
	if err != nil {
		return page{}, err
	}
	return page{name: "routers", Title: "Routers", Section: "Routers", Live: true, Data: sessions}, nil
}

func fencesPage(v *visit) (page, error) {
	if err := v.needs(openapi.Admin); err != nil {
		return page{}, err
	}
	fences, err := v.api.Fences(v.ctx, listed)
	if err != nil {
		return page{}, err
	}
	return page{name: "fences", Title: "Fences", Section: "Fences", Live: true, Data: fences}, nil
}

func teamsPage(v *visit) (page, error) {
	if err := v.needs(openapi.Admin); err != nil {
		return page{}, err
	}
	teams, err := v.api.Teams(v.ctx, listed)
	if err != nil {
		return page{}, err
	}
	return page{name: "teams", Title: "Teams and keys", Section: "Teams", Live: true, Data: teams}, nil
}

// deadData is the page that asks whether a router is to be declared dead.
type deadData struct {
	Session       openapi.ListedSession
	Reason, Error string
}

// maxReason bounds the reason of a declaration in characters, as the API does.
const maxReason = 500

func confirmDead(v *visit) (page, error) { return v.dead("", "") }

func (v *visit) dead(reason, wrong string) (page, error) {
	if err := v.needs(openapi.Admin); err != nil {
		return page{}, err
	}
	sessions, err := v.api.Sessions(v.ctx, most)
	if err != nil {
		return page{}, err
	}
	for _, s := range sessions.Sessions {
		if s.SessionID == v.PathValue("session") {
			p := page{name: "dead", Title: "Declare a router dead", Section: "Routers", Data: deadData{s, reason, wrong}}
			if wrong != "" {
				p.status = http.StatusUnprocessableEntity
			}
			return p, nil
		}
	}
	return page{}, &failure{http.StatusNotFound,
		"There is no such router: it has ended and no fence waits for it, or it never existed."}
}

// most is the length of the longest list that the API answers.
const most = 1000

// declareDead declares a router dead.
func declareDead(v *visit) (page, error) {
	reason := strings.TrimSpace(v.PostForm.Get("reason"))
	switch {
	case reason == "":
		return v.dead(reason, "Say how you know that the router has ended together with its Envoy.")
	case len([]rune(reason)) > maxReason:
		return v.dead(reason, fmt.Sprintf("At most %d characters.", maxReason))
	case v.PostForm.Get("sure") != "yes":
		return v.dead(reason, "Confirm that the router and its Envoy have ended.")
	}
	if _, err := v.api.DeclareDead(v.ctx, v.PathValue("session"), reason); err != nil {
		if status := statusOf(err); status == http.StatusConflict || status == http.StatusBadRequest {
			return v.dead(reason, sentence(reasonOf(err)))
		}
		return page{}, err
	}
	return v.redirect(base + "/fences?done=declared")
}

func sessionPath(id string) string { return base + "/routers/" + url.PathEscape(id) + "/declare-dead" }
