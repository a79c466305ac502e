package console

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/berth-sandbox/berth/internal/localhost"
)

type connectData struct {
	// API is the address of the API at the gateway.
	API, Pool string
	NeedsKey  bool
	Snippets  []snippet
	// Localhost: the names of sandboxes are below localhost.
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
	d.API = u.Scheme + "://api." + u.Host
	name := localhost.Hostname(u.Host)
	d.Localhost = name == "localhost" || strings.HasSuffix(name, ".localhost")
	key := "<your key>"
	if !d.NeedsKey {
		key = "e2b_0000"
	}
	environment := "export E2B_DOMAIN=" + u.Host
	if u.Scheme == "http" { // the domain alone is taken for one with TLS
		environment = fmt.Sprintf("export E2B_API_URL=%s\nexport E2B_SANDBOX_URL=http://%s", d.API, u.Host)
	}
	environment += "\nexport E2B_API_KEY=" + key
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
