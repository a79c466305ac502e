package apierror

import (
	"bytes"
	"html/template"
	"net/http"
)

// PageCSP is the Content-Security-Policy that Page needs: it loads nothing and
// runs nothing.
const PageCSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

// reloadMin is the shortest pause before a page reloads, in seconds: a reader
// should see what it says.
const reloadMin = 2

// pageTemplate has no percent sign, which Envoy's formats would read as a command.
var pageTemplate = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
{{- if .Reload}}
<meta http-equiv="refresh" content="{{.Reload}}">
{{- end}}
<title>{{.Title}}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 15vh auto; padding: 0 1em; color: #222; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.4em; }
small { color: #666; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } small { color: #999; } }
</style>
</head>
<body>
<main>
<h1>{{.Title}}</h1>
<p>{{.Message}}</p>
{{- if .Reload}}
<p>This page tries again by itself.</p>
{{- end}}
<p><small>{{.Code}} {{.Reason}}{{if .RequestID}} &middot; request {{.RequestID}}{{end}}</small></p>
</main>
</body>
</html>
`))

// Page returns the answer as an HTML page without other files. The page reloads itself if a retry
// may help.
func (e *Error) Page() []byte {
	data := struct {
		*Error
		Title  string
		Reload int
	}{Error: e, Title: e.title()}
	if KindOf(e.Reason).RetryAfter > 0 {
		data.Reload = max(e.RetryAfter, reloadMin)
	}
	var body bytes.Buffer
	if err := pageTemplate.Execute(&body, data); err != nil { // nothing in the data can fail
		return []byte("<!doctype html><title>Error</title>the page could not be made")
	}
	return body.Bytes()
}

func (e *Error) title() string {
	switch e.Reason {
	case SandboxNotFound:
		return "There is no such sandbox"
	case SandboxGone:
		return "This sandbox has ended"
	case PortPrivate:
		return "This port is private"
	case SandboxUnreachable:
		return "Nothing answers in this sandbox"
	case SandboxReset:
		return "The sandbox broke off"
	}
	switch {
	case KindOf(e.Reason).RetryAfter > 0:
		return "One moment, please"
	case e.Code < http.StatusInternalServerError:
		return "This request cannot be served"
	}
	return "Something went wrong"
}
