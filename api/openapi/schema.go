package openapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/berth-sandbox/berth/internal/printable"
)

// Schema checks a JSON value. It may be used concurrently.
type Schema struct {
	compiled *jsonschema.Schema
	quick    *quick
	refused  *refusal
	data     *data
}

// refusal is what Berth refuses of a property.
type refusal struct {
	// advice is empty if only properties within it are refused. accepted are the values that are
	// not refused besides null; absent: those that ask for nothing.
	advice     string
	accepted   []any
	properties map[string]*refusal
	names      []string // of properties, in order
}

// Problem is why a value is refused. It is an error.
type Problem struct {
	// Field is the path of the property or the name of the parameter; "body" for a whole body.
	Field string
	// Message says what is wrong, or what to do instead.
	Message string
	// Refused: the value is valid, and asks for what Berth cannot do.
	Refused bool
}

func (p *Problem) Error() string { return p.Field + ": " + p.Message }

// Check checks a JSON value. Its error is a *Problem.
func (s *Schema) Check(raw []byte) error {
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return &Problem{Field: "body", Message: short(fmt.Sprintf("must be one JSON object: %v", err))}
	}
	var members int
	if at, text := flawed(value, s.data, &members); text != "" {
		slices.Reverse(at)
		return &Problem{Field: field(cmp.Or(strings.Join(at, "."), "body")), Message: text}
	}
	if members != colons(raw) {
		return &Problem{Field: field(repeated(raw)), Message: "is there twice; send it once"}
	}
	if !s.quick.accepts(value) {
		if p := s.problem("body", value); p != nil {
			return p
		}
	}
	if p := s.refused.of(value); p != nil {
		return p
	}
	return nil
}

// The validator computes with exact numbers. These bounds of a number keep that cheap: 1e999999 has a
// million digits.
const (
	maxNumber = 1e18
	maxDigits = 32
)

// flawed returns what is wrong with a value whatever its schema is, and where that is, from the inside to the
// outside; "" for nothing. It adds the number of members of all objects, unless something is wrong.
func flawed(value any, d *data, members *int) (where []string, text string) {
	switch v := value.(type) {
	case json.Number:
		f, err := v.Float64()
		small := math.Abs(f) < 1/maxNumber && strings.ContainsAny(v.String(), "eE") // it has as many digits as a large one
		if err != nil || len(v) > maxDigits || math.Abs(f) >= maxNumber || small {
			return nil, fmt.Sprintf("%s: must be below %.0e and have at most %d characters", short(v.String()), maxNumber, maxDigits)
		}
	case string:
		if !d.any() {
			return nil, unprintable(v)
		}
	case []any:
		for i, one := range v {
			if where, text = flawed(one, d.item(), members); text != "" {
				return append(where, strconv.Itoa(i)), text
			}
		}
	case map[string]any:
		*members += len(v)
		for name, one := range v {
			if text = unprintable(name); text != "" {
				return []string{name}, "the name of the field: " + text
			}
			if where, text = flawed(one, d.property(name), members); text != "" {
				return append(where, name), text
			}
		}
	}
	return nil, ""
}

// unprintable says why a text is refused, "" for one that is not.
func unprintable(text string) string {
	if at, r := printable.Unprintable(text); at >= 0 {
		return fmt.Sprintf("%U at byte %d: control and format characters are refused; remove it", r, at)
	}
	return ""
}

// field is the path of a field, which a client has chosen, for one line.
func field(path string) string { return short(printable.Line(path)) }

// colons is the number of members of all objects in a valid JSON text: each has one colon outside of strings.
func colons(raw []byte) (n int) {
	inString := false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '"':
			inString = !inString
		case inString && c == '\\':
			i++
		case c == ':' && !inString:
			n++
		}
	}
	return n
}

// repeated returns the path of the first member that an object in a valid JSON text has twice. The decoder
// keeps the last one of them, and a proxy or a person may see the first.
func repeated(raw []byte) string {
	type object struct {
		path string // of itself
		seen map[string]bool
		name string // of the member that is read; "" with seen nil: an array
		key  bool   // a name follows
		next int    // element of an array
	}
	var open []object
	within := func() string {
		if len(open) == 0 {
			return ""
		}
		o := &open[len(open)-1]
		name := o.name
		if o.seen == nil {
			name = strconv.Itoa(o.next)
		}
		return strings.TrimPrefix(o.path+"."+name, ".")
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	for {
		token, err := decoder.Token()
		if err != nil {
			return "body" // not reached: the text is valid, and has a name twice
		}
		top := len(open) - 1
		switch delim, _ := token.(json.Delim); {
		case delim == '{':
			open = append(open, object{path: within(), seen: map[string]bool{}, key: true})
			continue
		case delim == '[':
			open = append(open, object{path: within()})
			continue
		case delim != 0:
			open, top = open[:top], top-1
		case top >= 0 && open[top].key:
			o := &open[top]
			o.name, o.key = token.(string), false
			if o.seen[o.name] {
				return within()
			}
			o.seen[o.name] = true
			continue
		}
		if top >= 0 { // a value has ended
			open[top].key, open[top].next = open[top].seen != nil, open[top].next+1
		}
	}
}

// data says which strings of a value may have any character: x-berth-data. nil is a value without such strings.
type data struct {
	every         bool // this string, or every string in this value
	properties    map[string]*data
	others, items *data
}

func (d *data) any() bool { return d != nil && d.every }

func (d *data) item() *data {
	if d == nil || d.every {
		return d
	}
	return d.items
}

func (d *data) property(name string) *data {
	if d == nil || d.every {
		return d
	}
	if listed, ok := d.properties[name]; ok {
		return listed
	}
	return d.others
}

// short bounds a text that a client has sent.
func short(text string) string {
	const most = 200 // bytes
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// problem returns one violation of the schema, nil for none. field names the value itself. An unknown
// field comes before all others: it may be the reason of a missing one.
func (s *Schema) problem(field string, value any) *Problem {
	var failed *jsonschema.ValidationError
	if err := s.compiled.Validate(value); !errors.As(err, &failed) {
		return nil
	}
	first := failed
	for e := range leaves(failed) {
		_, unknown := e.ErrorKind.(*kind.AdditionalProperties)
		if first == failed || unknown {
			first = e
		}
	}
	at := slices.Clone(first.InstanceLocation)
	var text string
	switch k := first.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		slices.Sort(k.Properties)
		text = "unknown field"
		if near := s.nearest(at, k.Properties[0]); near != "" {
			text += fmt.Sprintf("; did you mean %s?", near)
		}
		at = append(at, k.Properties[0])
	case *kind.Required:
		at, text = append(at, k.Missing[0]), "required"
	case *kind.Type:
		text = "must be " + article(k.Want)
		if seconds := secondsIn(value, at); seconds != "" && slices.Contains(k.Want, "integer") {
			text = "must be a number of seconds, such as " + seconds
		}
	case *kind.Minimum:
		text = fmt.Sprintf("%s: must be at least %s", k.Got.RatString(), k.Want.RatString())
	case *kind.Maximum:
		text = fmt.Sprintf("%s: must be at most %s", k.Got.RatString(), k.Want.RatString())
	case *kind.MaxLength:
		text = fmt.Sprintf("%d characters: at most %d", k.Got, k.Want)
	case *kind.MinLength:
		text = "must not be empty"
	case *kind.Enum:
		text = fmt.Sprintf("%q: must be one of %s", fmt.Sprint(k.Got), strings.Join(words(k.Want), ", "))
	default:
		text = k.LocalizedString(message.NewPrinter(language.English))
	}
	if _, whole := value.(map[string]any); whole && len(at) > 0 {
		field = cmp.Or(strings.Join(at, "."), `""`) // a property may have an empty name
	}
	return &Problem{Field: short(printable.Line(field)), Message: short(text)}
}

// secondsIn returns the number of seconds if the value at a path is a duration such as "5m", else "".
func secondsIn(value any, at []string) string {
	for _, name := range at {
		object, _ := value.(map[string]any)
		value = object[name]
	}
	text, _ := value.(string)
	if d, err := time.ParseDuration(text); err == nil && d%time.Second == 0 {
		return strconv.FormatInt(int64(d/time.Second), 10)
	}
	return ""
}

// leaves yields the errors that have no causes.
func leaves(e *jsonschema.ValidationError) iter.Seq[*jsonschema.ValidationError] {
	return func(yield func(*jsonschema.ValidationError) bool) { eachLeaf(e, yield) }
}

func eachLeaf(e *jsonschema.ValidationError, yield func(*jsonschema.ValidationError) bool) bool {
	if len(e.Causes) == 0 {
		return yield(e)
	}
	for _, cause := range e.Causes {
		if !eachLeaf(cause, yield) {
			return false
		}
	}
	return true
}

// article names JSON types. null is left out: a field that may be null may be left out too.
func article(types []string) string {
	var all []string
	for _, t := range types {
		switch t {
		case "null":
		case "integer", "array", "object":
			all = append(all, "an "+t)
		default:
			all = append(all, "a "+t)
		}
	}
	return strings.Join(all, " or ")
}

func words(values []any) []string {
	var all []string
	for _, v := range values {
		if text, ok := v.(string); ok {
			all = append(all, text)
		}
	}
	return all
}

// of returns the first refused property within value, nil for none.
func (r *refusal) of(value any) *Problem {
	if r == nil || value == nil {
		return nil
	}
	if r.advice != "" && !r.accepts(value) {
		return &Problem{Message: r.advice, Refused: true}
	}
	object, _ := value.(map[string]any)
	for _, name := range r.names {
		if p := r.properties[name].of(object[name]); p != nil {
			p.Field = strings.TrimSuffix(name+"."+p.Field, ".")
			return p
		}
	}
	return nil
}

func (r *refusal) accepts(value any) bool {
	if r.accepted != nil {
		return slices.ContainsFunc(r.accepted, func(a any) bool { return reflect.DeepEqual(a, value) })
	}
	switch v := value.(type) {
	case bool:
		return !v
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	}
	return false
}

// nearest returns the property that a name within the object at a path may mean, "" for none.
func (s *Schema) nearest(at []string, name string) string {
	schema := s.compiled
	for _, part := range at {
		for schema.Ref != nil {
			schema = schema.Ref
		}
		if schema = schema.Properties[part]; schema == nil {
			return ""
		}
	}
	for schema.Ref != nil {
		schema = schema.Ref
	}
	const most, longest = 3, 40 // edits, bytes
	if len(name) > longest {
		return ""
	}
	best, least := "", most+1
	for _, known := range slices.Sorted(maps.Keys(schema.Properties)) {
		a, b := strings.ToLower(known), strings.ToLower(name)
		d := distance(a, b)
		if len(b) > most && strings.HasPrefix(a, b) {
			d = min(d, most)
		}
		if d < least && d < len(b) {
			best, least = known, d
		}
	}
	return best
}

// distance is the Levenshtein distance of two short strings.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := before
			if a[i] != b[j] {
				cost = 1 + min(before, row[j], row[j+1])
			}
			before, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}

// CheckQuery checks the parameters of a query. Its error is a *Problem.
func (o *Operation) CheckQuery(values url.Values) error {
	for i := range o.Query {
		if p := &o.Query[i]; p.required && len(values[p.Name]) == 0 {
			return &Problem{Field: p.Name, Message: "required"}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		i := slices.IndexFunc(o.Query, func(p Parameter) bool { return p.Name == name })
		if i < 0 {
			return &Problem{Field: field(name), Message: "unknown parameter"}
		}
		if p := o.Query[i].check(values[name]); p != nil {
			return p
		}
	}
	return nil
}

func (p Parameter) check(values []string) *Problem {
	if len(values) > 1 && !p.repeated {
		return &Problem{Field: p.Name, Message: "must be given once"}
	}
	for _, v := range values {
		if text := unprintable(v); text != "" {
			return &Problem{Field: p.Name, Message: text}
		}
	}
	var value any = values[0]
	switch p.kind {
	case "integer":
		n, err := strconv.ParseInt(values[0], 10, 64)
		if err != nil {
			return &Problem{Field: p.Name, Message: short(fmt.Sprintf("%q: must be an integer", values[0]))}
		}
		value = n
	case "boolean":
		switch values[0] {
		case "true", "false":
			value = values[0] == "true"
		default:
			return &Problem{Field: p.Name, Message: short(fmt.Sprintf("%q: must be true or false", values[0]))}
		}
	case "array":
		var all []any
		for one := range strings.SplitSeq(strings.Join(values, ","), ",") {
			all = append(all, one)
		}
		value = all
	}
	return p.schema.problem(p.Name, value)
}
