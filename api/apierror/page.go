package apierror

import (
	"bytes"
	"html/template"
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"
)

// PageCSP is the Content-Security-Policy that Page and Home need: they load nothing and run
// nothing.
const PageCSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

// docsURL is where the pages send people.
const docsURL = "https://github.com/berth-sandbox/berth/blob/main/docs"

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
<title>{{.Title}} - Berth</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 15vh auto; padding: 0 1em; color: #222; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.4em; }
small { color: #666; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } a { color: #8bf; } small { color: #999; } }
</style>
</head>
<body>
<main>
<h1>{{.Title}}</h1>
{{- range .Text}}
<p>{{.}}</p>
{{- end}}
{{- range .Links}}
<p><a href="{{.}}">{{.}}</a></p>
{{- end}}
{{- if .Reload}}
<p>This page tries again by itself.</p>
{{- end}}
<p><small>Berth
{{- range .Small}} &middot; {{.}}{{end}} &middot; <a href="{{.Docs}}">Documentation</a></small></p>
</main>
</body>
</html>
`))

// page is the data of pageTemplate.
type page struct {
	Title  string
	Text   []string
	Links  []string
	Small  []string
	Docs   string
	Reload int
}

func (p page) render() []byte {
	var body bytes.Buffer
	if err := pageTemplate.Execute(&body, p); err != nil { // nothing in the data can fail
		return []byte("<!doctype html><title>Error</title>the page could not be made")
	}
	return body.Bytes()
}

// Page returns the answer as an HTML page without other files. The page reloads itself if a retry
// may help.
func (e *Error) Page() []byte {
	if e.Home != "" {
		return Home(e.Home)
	}
	p := page{Title: e.title(), Links: e.Links, Docs: docsURL + "/reference/errors.md"}
	kind, message := KindOf(e.Reason), e.Message
	if e.RetryAfter > 0 {
		p.Reload = max(e.RetryAfter, reloadMin)
		message = strings.TrimSuffix(message, "; try again")
	}
	if !strings.EqualFold(message, p.Title) {
		p.Text = append(p.Text, sentence(message))
	}
	if e.Reason == SandboxNotFound || e.Reason == SandboxGone {
		p.Text = append(p.Text, sentence(kind.Do))
	}
	p.Small = append(p.Small, http.StatusText(e.Code)+" ("+string(e.Reason)+")")
	if e.SandboxID != "" {
		p.Small = append(p.Small, "sandbox "+e.SandboxID)
	}
	if e.RequestID != "" {
		p.Small = append(p.Small, "request "+e.RequestID)
	}
	return p.render()
}

// Home returns the page that people get at the domain of the sandboxes and at its API.
func Home(domain string) []byte {
	return page{
		Title: "Berth",
		Text: []string{
			"Berth runs sandboxes for AI agents. Each sandbox has an address of its own below this domain: " +
				"<port>-<sandbox ID>." + domain + ".",
			"Programs claim and release sandboxes through the API, at api." + domain +
				" if the operator serves it there. What a sandbox shows is made by its user, not by the operator of this domain.",
		},
		Docs: docsURL + "/overview.md",
	}.render()
}

// sentence returns a message with a capital letter at the begin and a full stop at the end.
func sentence(message string) string {
	first, size := utf8.DecodeRuneInString(message)
	if size == 0 {
		return ""
	}
	message = string(unicode.ToUpper(first)) + message[size:]
	if strings.HasSuffix(message, ".") || strings.HasSuffix(message, "?") {
		return message
	}
	return message + "."
}

func (e *Error) title() string {
	switch e.Reason {
	case SandboxNotFound:
		return "There is no such sandbox"
	case SandboxGone:
		return "This sandbox has ended"
	case AccessDenied:
		return "This sandbox is private"
	case PortPrivate:
		return "This port is private"
	case SandboxUnreachable:
		return "Nothing answers in this sandbox"
	case SandboxReset:
		return "The sandbox broke off"
	}
	switch {
	case e.RetryAfter > 0:
		return "One moment, please"
	case e.Reason == SandboxAsleep:
		return "This sandbox is asleep"
	case e.Code < http.StatusInternalServerError:
		return "This request cannot be served"
	}
	return "Something went wrong"
}
