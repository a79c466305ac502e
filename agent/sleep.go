package agent

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// A client needs no token to send an order, as for boxes. Orders are small, so that there can be more.
const (
	maxOrders = 16
	orderWait = 2 * time.Second
)

// sleep takes the box with an order and carries the order out.
func (a *Agent) sleep(w http.ResponseWriter, _ *http.Request, sealed []byte) error {
	o, err := a.o.Keys.OpenOrder(sealed)
	if err != nil {
		return err
	}
	if !a.holds(w, o.SandboxID) {
		return nil
	}
	obeyed, err := a.o.Freezer.Obey(*o)
	var refusal *initbox.Refusal
	switch {
	case errors.Is(err, freeze.ErrSuperseded):
		Error(w, http.StatusConflict, err.Error())
	case errors.As(err, &refusal):
		a.o.Log.Warn("the sandbox does not fall asleep", "error", refusal)
		writeJSON(w, http.StatusUnprocessableEntity, struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
			*initbox.Refusal
		}{http.StatusUnprocessableEntity, refusal.Error(), refusal})
	default:
		writeJSON(w, http.StatusOK, obeyed)
	}
	return nil
}

// holds reports whether the agent was configured for the sandbox of an order. Otherwise it answers.
func (a *Agent) holds(w http.ResponseWriter, id string) bool {
	switch c := a.Config(); {
	case c == nil:
		Error(w, http.StatusServiceUnavailable, errUnconfigured.Error())
	case c.SandboxID != id:
		Error(w, http.StatusMisdirectedRequest, fmt.Sprintf("this agent was configured for sandbox %s", c.SandboxID))
	default:
		return true
	}
	return false
}
