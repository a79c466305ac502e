package support

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// removed stands for what was removed.
const removed = "[removed]"

// shortest is the length of the shortest value of a Secret that is removed everywhere. Shorter ones may be ordinary words.
const shortest = 8

// Fields whose text is a secret.
var secretFields = []string{
	"token", "accesstoken", "trafficaccesstoken", "envdaccesstoken", "password", "secret", "apikey", "authorization",
	"signaturesecret", "privatekey", "cookie", "clientsecret",
}

var shapes = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`e2b_[0-9A-Za-z]{8,}`), removed},
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`), "$1 " + removed},
	{regexp.MustCompile(`eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), removed},
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\z)`), removed},
	// As Envoy prints headers: one on a line, behind the time that the kubelet adds. Any of them may be a secret that a
	// sandbox does not have.
	{regexp.MustCompile(`(?m)^((?:\d{4}-\S+Z )?'[^':\n][^'\n]*', ')[^\n]+'`), "$1" + removed + "'"},
	{regexp.MustCompile(`(?i)('[^'\n]*(?:key|token|password|secret|authorization|cookie|signature)', ')[^'\n]+`), "$1" + removed},
	{regexp.MustCompile(`(?i)\b(x-api-key|(?:[a-z-]*access[_-]?)token|token|password|passwd|secret|api[_-]?key|` +
		`authorization|set-cookie|cookie|signature)(\\?["']?\s*[:=]\s*\\?["']?)[^\s"'\\,;&}\[\]][^\s"'\\,;&}\]]*`), "$1$2" + removed},
}

// digits are tokens of sandboxes, and digests, which stay.
var digits = regexp.MustCompile(`(sha256:|containerd://|docker://)?[0-9a-f]{64,}`)

// ids have the shape of a sandbox ID, which opens a public sandbox.
var ids = regexp.MustCompile(`\b[a-z0-9]{20}\b`)

// redactor removes secrets. It may be used concurrently.
type redactor struct{ known *strings.Replacer }

// newRedactor returns a redactor that knows some secrets.
func newRedactor(known ...string) *redactor {
	var forms []string
	for _, k := range known {
		for _, form := range []string{k, strings.TrimSpace(k), base64.StdEncoding.EncodeToString([]byte(k))} {
			if len(form) >= shortest {
				forms = append(forms, form)
			}
		}
	}
	slices.SortFunc(forms, func(a, b string) int { return len(b) - len(a) }) // one may be a part of another
	pairs := make([]string, 0, 2*len(forms))
	for _, form := range forms {
		pairs = append(pairs, form, removed)
	}
	return &redactor{strings.NewReplacer(pairs...)}
}

// text removes what has the shape of a secret, or is known as one.
func (r *redactor) text(b []byte) []byte {
	b = []byte(r.known.Replace(string(b)))
	for _, s := range shapes {
		b = s.pattern.ReplaceAll(b, []byte(s.with))
	}
	b = ids.ReplaceAllFunc(b, func(id []byte) []byte { return []byte(sandboxid.Short(string(id))) })
	return digits.ReplaceAllFunc(b, func(found []byte) []byte {
		if i := bytes.IndexByte(found, ':'); i > 0 {
			return found
		}
		return []byte(removed)
	})
}

// object removes from JSON what is secret by its place, and then what is by its shape.
func (r *redactor) object(raw []byte) ([]byte, error) {
	var v any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	place(v, false)
	clean, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return nil, err
	}
	return r.text(clean), nil
}

// place removes values by the names of their fields. commands says that commands may stay: they are those of Berth.
func place(v any, commands bool) {
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			place(one, commands)
		}
	case map[string]any:
		delete(v, "managedFields")
		if meta, ok := v["metadata"].(map[string]any); ok {
			labels, _ := meta["labels"].(map[string]any)
			commands = commands || labels["app.kubernetes.io/name"] == "berth" && labels[v1alpha1.LabelPool] == nil
		}
		for name, value := range v {
			field := strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(name))
			switch inner := value.(type) {
			case string:
				if slices.Contains(secretFields, field) && inner != "" {
					v[name] = removed
				}
			case map[string]any:
				switch {
				case field == "env" || field == "envs" || field == "envvars" || field == "secrets" || field == "headers" ||
					field == "stringdata" || field == "data" || field == "binarydata" || field == "metadata" && !isObjectMeta(inner):
					empty(inner, func(string) bool { return false })
				case field == "annotations":
					empty(inner, ownAnnotation)
				case field == "terminated" && inner["message"] != nil && !commands: // the container wrote it
					inner["message"] = removed
				}
			case []any:
				switch {
				case field == "env":
					for _, one := range inner {
						if e, ok := one.(map[string]any); ok && e["value"] != nil {
							e["value"] = removed
						}
					}
				case (field == "command" || field == "args") && !commands, field == "loglines":
					v[name] = []any{removed}
				}
			}
			place(v[name], commands)
		}
	}
}

// isObjectMeta reports whether metadata is that of Kubernetes, and not what a claimer wrote, which has only texts.
func isObjectMeta(m map[string]any) bool {
	if m["uid"] != nil || m["resourceVersion"] != nil {
		return true
	}
	for _, value := range m {
		if _, ok := value.(string); !ok {
			return true
		}
	}
	return false
}

// ownAnnotation reports whether an annotation is one of Berth or of Kubernetes whose value is no copy of an object.
func ownAnnotation(name string) bool {
	domain, _, found := strings.Cut(name, "/")
	return found && name != "kubectl.kubernetes.io/last-applied-configuration" &&
		(domain == "berth.sh" || domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io"))
}

// empty removes the values whose names are not kept.
func empty(m map[string]any, kept func(string) bool) {
	for name := range m {
		if !kept(name) {
			m[name] = removed
		}
	}
}
