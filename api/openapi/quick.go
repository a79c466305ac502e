package openapi

import (
	"encoding/json"
	"math"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// quick accepts the values that most requests have, without an allocation. It is the part of a schema
// that needs simple keywords only. It accepts no value that the schema refuses. The validator judges what
// it does not accept, and finds the message. A nil quick accepts nothing.
type quick struct {
	null, boolean, integer, text, array, object bool

	least, most       int64 // of a number
	shortest, longest int   // of a string, in characters
	words             []string
	items             *quick
	maxItems          int
	properties        map[string]*quick
	others            *quick // of properties that are not listed
	required          []string
}

// simple are the keywords that quick knows, and those without an effect.
var simple = []string{
	"DraftVersion", "Location", "ID", "Anchor", "Ref", "Types", "Enum", "Minimum", "Maximum", "MinLength", "MaxLength",
	"Items2020", "MaxItems", "Properties", "AdditionalProperties", "Required",
	"Title", "Description", "Default", "Comment", "ReadOnly", "WriteOnly", "Examples", "Deprecated",
}

// deepest bounds a schema that contains itself.
const deepest = 8

// quickOf returns nil for a schema with other keywords.
func quickOf(s *jsonschema.Schema, depth int) *quick {
	if s == nil || depth == deepest || s.Ref == nil && s.Types == nil {
		return nil
	}
	value := reflect.ValueOf(s).Elem()
	for i := range value.NumField() {
		field := value.Type().Field(i)
		if field.IsExported() && !slices.Contains(simple, field.Name) && !value.Field(i).IsZero() {
			return nil
		}
	}
	if s.Ref != nil {
		if s.Types != nil { // both count
			return nil
		}
		return quickOf(s.Ref, depth+1)
	}
	types := s.Types.ToStrings()
	has := func(name string) bool { return slices.Contains(types, name) }
	q := &quick{
		null: has("null"), boolean: has("boolean"), integer: has("integer") || has("number"), text: has("string"),
		array: has("array"), object: has("object"),
		longest: orElse(s.MaxLength, math.MaxInt), shortest: orElse(s.MinLength, 0), maxItems: orElse(s.MaxItems, math.MaxInt),
		items: quickOf(s.Items2020, depth+1), required: s.Required, properties: map[string]*quick{},
	}
	var ok bool
	if q.least, ok = bound(s.Minimum, math.MinInt64); !ok {
		return nil
	}
	if q.most, ok = bound(s.Maximum, math.MaxInt64); !ok {
		return nil
	}
	if s.Enum != nil {
		if q.words = words(s.Enum.Values); len(q.words) != len(s.Enum.Values) || len(types) != 1 || !q.text {
			return nil
		}
	}
	for name, property := range s.Properties {
		q.properties[name] = quickOf(property, depth+1)
	}
	if others, ok := s.AdditionalProperties.(*jsonschema.Schema); ok {
		q.others = quickOf(others, depth+1)
	}
	return q
}

func orElse(n *int, absent int) int {
	if n == nil {
		return absent
	}
	return *n
}

// bound returns false for a bound that is no integer.
func bound(r *big.Rat, absent int64) (int64, bool) {
	switch {
	case r == nil:
		return absent, true
	case !r.IsInt() || !r.Num().IsInt64():
		return 0, false
	}
	return r.Num().Int64(), true
}

// accepts reports whether a value surely satisfies the schema.
func (q *quick) accepts(value any) bool {
	if q == nil {
		return false
	}
	switch v := value.(type) {
	case nil:
		return q.null
	case bool:
		return q.boolean
	case json.Number:
		n, err := strconv.ParseInt(string(v), 10, 64)
		return q.integer && err == nil && n >= q.least && n <= q.most
	case string:
		n := utf8.RuneCountInString(v)
		return q.text && n >= q.shortest && n <= q.longest && (q.words == nil || slices.Contains(q.words, v))
	case []any:
		return q.array && len(v) <= q.maxItems && !slices.ContainsFunc(v, func(one any) bool { return !q.items.accepts(one) })
	case map[string]any:
		return q.object && q.acceptsObject(v)
	}
	return false
}

func (q *quick) acceptsObject(object map[string]any) bool {
	for name, value := range object {
		property, listed := q.properties[name]
		if !listed {
			property = q.others
		}
		if !property.accepts(value) {
			return false
		}
	}
	return !slices.ContainsFunc(q.required, func(name string) bool {
		_, has := object[name]
		return !has
	})
}
