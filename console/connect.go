package console

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/berth-sandbox/berth/internal/localhost"
)

type connectData struct {
	// API is the address of the API at the gateway, Domain that of the sandboxes with a port if it has one.
	API, Domain string
	// Port: the domain alone does not lead there, so the SDKs are told the addresses.
	Port      bool
	Pool      string
	NeedsKey  bool
	Snippets  []snippet
	Localhost bool
}

type snippet struct{ ID, Name, Text string }

// connectPage shows how programs use this installation.
func connectPage(v *visit) (page, error) {
	pools, err := v.api.Pools(v.ctx)
	if err != nil {
		return page{}, err
	}
	d := connectData{Pool: "base", NeedsKey: v.caller.Key != ""}
	if len(pools) > 0 {
		d.Pool = pools[0].Name
	}
	u, err := url.Parse(v.caller.PublicURL)
	if err != nil {
		return page{}, err
	}
	d.Domain, d.API = u.Host, u.Scheme+"://api."+u.Host
	d.Port = u.Port() != "" || u.Scheme == "http"
	name := localhost.Hostname(u.Host)
	d.Localhost = name == "localhost" || strings.HasSuffix(name, ".localhost")
	key := "<your key>"
	if !d.NeedsKey {
		key = "e2b_0000"
	}
	environment := "export E2B_DOMAIN=" + u.Host + "\nexport E2B_API_KEY=" + key
	if d.Port {
		environment = fmt.Sprintf("export E2B_API_URL=%s\nexport E2B_SANDBOX_URL=%s://%s\n%s",
			d.API, u.Scheme, u.Host, environment)
	}
	d.Snippets = []snippet{
		{"env", "Environment of E2B's SDKs", environment},
		{"js", "JavaScript", fmt.Sprintf(inJavaScript, d.Pool)},
		{"python", "Python", fmt.Sprintf(inPython, d.Pool)},
		{"cli", "Command line", fmt.Sprintf(inShell, d.API, keyFile(d.NeedsKey), d.Pool)},
		{"curl", "curl", fmt.Sprintf(withCurl, d.API, keyHeader(d.NeedsKey), d.Pool)},
	}
	return page{name: "connect", Title: "Connect", Section: "Connect", Data: d}, nil
}

const (
	inJavaScript = `import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create('%s')
const { stdout } = await sandbox.commands.run('echo hello')
console.log(stdout)
await sandbox.kill()`
	inPython = `from e2b import Sandbox

sandbox = Sandbox.create("%s")
print(sandbox.commands.run("echo hello").stdout)
sandbox.kill()`
	inShell = `berth context set this --api-url %s%s
berth context use this
berth claim %s`
	withCurl = `curl -X POST %s/sandboxes%s \
  -d '{"templateID":"%s","timeout":300}'`
)

func keyFile(needed bool) string {
	if needed {
		return " --api-key-file ~/.berth-key"
	}
	return ""
}

func keyHeader(needed bool) string {
	if needed {
		return " \\\n  -H \"X-API-Key: $E2B_API_KEY\""
	}
	return ""
}
