package console

import (
	"crypto/rand"
	"strings"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/client"
)

// agentData is what a page shows that speaks with the agent of a sandbox. The script of the page calls the agent
// through the gateway, with the token that the API gives to keys that may act for the team of the sandbox.
type agentData struct{ ID, Agent, Token, Path string }

// agentOf returns what a page needs to speak with the agent of the sandbox in its address.
func (v *visit) agentOf() (*agentData, error) {
	if err := v.needs(openapi.Member); err != nil {
		return nil, err
	}
	s, err := v.api.Get(v.ctx, v.PathValue("id"))
	if err != nil {
		return nil, err
	}
	at, err := client.URL(s, sandboxaccess.AgentPort)
	if err != nil {
		return nil, err
	}
	d := &agentData{ID: s.SandboxID, Agent: strings.TrimSuffix(at, "/")}
	if s.EnvdAccessToken != nil { // nil: a public agent
		d.Token = *s.EnvdAccessToken
	}
	return d, nil
}

func terminalPage(v *visit) (page, error) {
	d, err := v.agentOf()
	return page{
		name: "terminal", Title: "Terminal", Section: "Sandboxes", Data: d, connects: true, Nonce: rand.Text(),
	}, err
}

func filesPage(v *visit) (page, error) {
	d, err := v.agentOf()
	if err == nil {
		d.Path = or(v.URL.Query().Get("path"), "/")
	}
	return page{name: "files", Title: "Files", Section: "Sandboxes", Data: d, connects: true}, err
}
