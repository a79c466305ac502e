package console

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"html/template"
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/printable"
)

// page is what a template shows.
type page struct {
	name   string // of the template
	status int    // 0: 200
	// Title is the heading. Section is the entry of the navigation to which the page belongs.
	Title, Section string
	// Live: the script shows changes as they happen.
	Live bool
	Data any
	// connects and opens: the page connects to sandboxes, or has a form that opens one. Both are to the domain of the
	// sandboxes only.
	connects, opens bool
	// Nonce lets elements style of a script of the page in, for the terminal. Optional.
	Nonce string
}

// shell is what the frame around a page shows.
type shell struct {
	page
	Caller   *openapi.Caller // nil: no one is signed in
	Open     bool            // there is no sign-in
	Sections []section
	Done     string // what the form before this page has done
}

type section struct {
	Name, Path string
	Current    bool
}

// sections are the entries of the navigation, with the role that the API asks of a key for them.
var sections = []struct {
	name, path string
	role       openapi.CallerRole
}{
	{"Overview", home, openapi.ReadOnly},
	{"Pools", base + "/pools", openapi.ReadOnly},
	{"Sandboxes", base + "/sandboxes", openapi.ReadOnly},
	{"Routers", base + "/routers", openapi.Admin},
	{"Fences", base + "/fences", openapi.Admin},
	{"Teams", base + "/teams", openapi.Admin},
	{"Connect", base + "/connect", openapi.ReadOnly},
}

// done are the words for what a form has done, by the parameter of the page after it.
var done = map[string]string{
	"scaled":   "The pool is being scaled.",
	"ended":    "The sandbox was released. Its pod goes when its fence is complete.",
	"moved":    "The end of the sandbox was moved.",
	"declared": "The router was declared dead. No fence waits for it any more.",
}

// write shows a page. v is nil where no one is signed in.
func (c *Console) write(w http.ResponseWriter, r *http.Request, status int, p page, v *visit) {
	s := shell{page: p, Open: c.o.Open, Done: done[r.URL.Query().Get("done")]}
	if v != nil && v.caller != nil {
		s.Caller = v.caller
		for _, one := range sections {
			if v.may(one.role) {
				s.Sections = append(s.Sections, section{one.name, one.path, one.name == p.Section})
			}
		}
		connect, forms := "", ""
		if domain := sandboxSource(v.caller.PublicURL); p.connects {
			connect = domain
		} else if p.opens {
			forms = domain
		}
		w.Header().Set("Content-Security-Policy", policy(connect, forms, p.Nonce))
	}
	var out bytes.Buffer
	if err := c.pages[p.name].ExecuteTemplate(&out, "layout", s); err != nil {
		c.o.Log.Error("a page of the console failed", zap.String("page", p.name), zap.Error(err))
		http.Error(w, "This page of the console is broken; see the log.", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	c.send(w, cmp.Or(status, http.StatusOK), printable.JSON(out.Bytes()))
}

// send sends an answer, which the browser must read in time.
func (c *Console) send(w http.ResponseWriter, status int, body []byte) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendWait)) // fails without a connection, in tests
	w.WriteHeader(status)
	_, _ = w.Write(body) // the browser may have gone
}

// refuse answers with a page without a frame.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, status int, text string) {
	c.write(w, r, status, page{name: "failed", Title: "Not possible", Data: text}, nil)
}

// sandboxSource is the source of a policy that stands for all sandboxes, "" if there is none.
func sandboxSource(public string) string {
	u, err := url.Parse(public)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
		strings.ContainsFunc(u.Host, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`;,'"*`, r) }) {
		return ""
	}
	return u.Scheme + "://*." + u.Host
}

// asset is a file that pages use. Its path has a digest of its content, so that browsers can keep it.
type asset struct {
	path, kind string
	content    []byte
}

var kinds = map[string]string{
	".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

// loadAssets returns the files below static by their path there. Files of other kinds, such as licences, are not
// served.
func loadAssets(from fs.FS) (map[string]asset, error) {
	all := map[string]asset{}
	err := fs.WalkDir(from, "static", func(name string, e fs.DirEntry, err error) error {
		kind, ok := kinds[path.Ext(name)]
		if err != nil || e.IsDir() || !ok {
			return err
		}
		raw, err := fs.ReadFile(from, name)
		if err != nil {
			return err
		}
		sum, short := sha256.Sum256(raw), strings.TrimPrefix(name, "static/")
		named := strings.TrimSuffix(short, path.Ext(name)) + "-" + hex.EncodeToString(sum[:6]) + path.Ext(name)
		all[short] = asset{path: base + "/static/" + named, kind: kind, content: raw}
		return nil
	})
	return all, err
}

func (c *Console) serveAsset(w http.ResponseWriter, r *http.Request) {
	for _, a := range c.assets {
		if a.path == r.URL.Path {
			w.Header().Set("Content-Type", a.kind)
			w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
			c.send(w, http.StatusOK, a.content)
			return
		}
	}
	http.NotFound(w, r)
}

// loadPages parses the templates: each with the frame and the shared parts.
func (c *Console) loadPages(from fs.FS) (map[string]*template.Template, error) {
	files, err := fs.Glob(from, "templates/*.html")
	if err != nil {
		return nil, err
	}
	pages := map[string]*template.Template{}
	for _, file := range files {
		name := strings.TrimSuffix(path.Base(file), ".html")
		if name == "layout" || name == "parts" {
			continue
		}
		t, err := template.New(name).Funcs(c.funcs()).ParseFS(from, "templates/layout.html", "templates/parts.html", file)
		if err != nil {
			return nil, err
		}
		pages[name] = t
	}
	return pages, nil
}

// badge is a state in a word and a colour: ok, busy, bad or still.
type badge struct{ Kind, Text string }

// funcs are the functions of the templates.
func (c *Console) funcs() template.FuncMap {
	return template.FuncMap{
		"asset": func(name string) (string, error) {
			if a, ok := c.assets[name]; ok {
				return a.path, nil
			}
			return "", fmt.Errorf("no file %q", name)
		},
		"badge":       func(kind, text string) badge { return badge{kind, text} },
		"stamp":       stamp,
		"iso":         iso,
		"past":        func(t time.Time) template.HTML { return element(t, ago(c.o.Now().Sub(t))) },
		"future":      func(t time.Time) template.HTML { return element(t, until(t.Sub(c.o.Now()))) },
		"clip":        clip,
		"keys":        sortedKeys,
		"words":       func(v any) string { return words(fmt.Sprint(v)) },
		"seconds":     func(n float64) string { return span(time.Duration(n * float64(time.Second))) },
		"bytes":       size,
		"advice":      advice,
		"sessionPath": sessionPath,
		"podKind": func(p openapi.PodDiagnostics) string {
			switch {
			case p.Phase == "Failed":
				return "bad"
			case p.Phase == "Running" && !p.Deleting:
				return "ok"
			}
			return "busy"
		},
		"podWord": func(p openapi.PodDiagnostics) string {
			if p.Deleting {
				return "deleting"
			}
			return strings.ToLower(p.Phase)
		},
	}
}

func sortedKeys(m map[string]string) []string {
	all := make([]string, 0, len(m))
	for k := range m {
		all = append(all, k)
	}
	slices.Sort(all)
	return all
}

// maxText is how much of a message of others a page shows, in bytes.
const maxText = 2 << 10

// clip bounds a text.
func clip(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "… (" + fmt.Sprint(len(text)-maxText) + " more bytes)"
}

func iso(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// element shows a time as a text, which has no character to escape. A list has hundreds: as a template each would take
// six calls by reflection.
func element(t time.Time, text string) template.HTML {
	//nolint:gosec // digits and words of this package
	return template.HTML(`<time datetime="` + iso(t) + `" title="` + stamp(t) + `">` + text + `</time>`)
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// ago is the age of something.
func ago(d time.Duration) string {
	if d < time.Second {
		return "now"
	}
	return span(d) + " ago"
}

// until is the time left until something.
func until(d time.Duration) string {
	if d <= 0 {
		return "due"
	}
	return "in " + span(d)
}

// span is a duration in its two largest units, or in one if that is short.
func span(d time.Duration) string {
	d = d.Round(time.Second)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 10*time.Minute && d%time.Minute != 0:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 24*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d d %d h", int(d.Hours())/24, int(d.Hours())%24)
}

// size is a number of bytes.
func size(n int64) string {
	const kib = 1 << 10
	units := []string{"KiB", "MiB", "GiB", "TiB"}
	if n < kib {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/kib, 0
	for ; f >= kib && i < len(units)-1; i++ {
		f /= kib
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}
