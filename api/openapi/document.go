package openapi

import (
	"bytes"
	_ "embed" // of the document
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"
)

// YAML is the document.
//
//go:embed openapi.yaml
var YAML []byte

// Document is what a server needs from the document. It may be used concurrently.
type Document struct {
	// JSON is the document as JSON.
	JSON []byte
	// Operations are in no order.
	Operations []Operation
}

// Operation is a call of the API.
type Operation struct {
	// ID is its operationId.
	ID string
	// Method is in capitals. Paths are its path behind each of its servers, with parameters in
	// braces, as net/http.ServeMux has them.
	Method string
	Paths  []string
	// Query are its query parameters.
	Query []Parameter
	// Body is the schema of its body, nil if it has none.
	Body         *Schema
	BodyRequired bool
	// Refused is the advice of a call that Berth cannot carry out, "" for all others.
	Refused string
	// Role is what a caller needs for it: x-berth-role, "" for a refused call.
	Role string
}

// Parameter is a query parameter.
type Parameter struct {
	Name   string
	schema *Schema
	kind   string // its JSON type
	// repeated: an array may be given in several values.
	repeated bool
	required bool // it must be in the query
}

// document is the part of an OpenAPI document that Load reads.
type document struct {
	Paths      map[string]map[string]json.RawMessage `json:"paths"`
	Components struct {
		Parameters map[string]parameter `json:"parameters"`
	} `json:"components"`
}

type operation struct {
	OperationID string      `json:"operationId"`
	Parameters  []parameter `json:"parameters"`
	RequestBody *struct {
		Required bool `json:"required"`
	} `json:"requestBody"`
	Refused string `json:"x-berth-refused"`
	Role    string `json:"x-berth-role"`
}

type parameter struct {
	Ref  string `json:"$ref"`
	Name string `json:"name"`
	In   string `json:"in"`
	// Required is for parameters of the query.
	Required bool `json:"required"`
	// Explode is true if it is absent.
	Explode *bool `json:"explode"`
	Schema  struct {
		Type string `json:"type"`
	} `json:"schema"`
}

// Load returns the document, which it reads once. The caller must not change it. It may be called
// concurrently, and so may the methods of the document.
func Load() (*Document, error) { return load() }

var load = sync.OnceValues(read)

func read() (*Document, error) {
	raw, err := yaml.YAMLToJSON(YAML)
	if err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	var parsed document
	if err := json.Unmarshal(raw, &parsed); err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	schemas, err := newSchemas(raw)
	if err != nil {
		return nil, err
	}
	d := &Document{JSON: raw}
	var errs []error
	for path, item := range parsed.Paths {
		prefixes, err := serversOf(item["servers"])
		errs = append(errs, err)
		for method, raw := range item {
			switch method {
			case "get", "put", "post", "delete", "patch":
				op, err := parsed.operation(schemas, path, method, raw)
				for _, prefix := range prefixes {
					op.Paths = append(op.Paths, prefix+path)
				}
				d.Operations, errs = append(d.Operations, op), append(errs, err)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	return d, nil
}

// serversOf returns the prefixes of a path.
func serversOf(raw json.RawMessage) ([]string, error) {
	if raw == nil {
		return []string{""}, nil
	}
	var servers []struct {
		URL string `json:"url"`
	}
	err := json.Unmarshal(raw, &servers)
	prefixes := make([]string, 0, len(servers))
	for _, s := range servers {
		prefixes = append(prefixes, strings.TrimSuffix(s.URL, "/"))
	}
	return prefixes, err
}

func (d *document) operation(schemas *schemas, path, method string, raw json.RawMessage) (Operation, error) {
	var o operation
	if err := json.Unmarshal(raw, &o); err != nil {
		return Operation{}, err
	}
	op := Operation{ID: o.OperationID, Method: strings.ToUpper(method), Refused: o.Refused, Role: o.Role}
	if op.Refused != "" {
		return op, nil
	}
	at := "/paths/" + escape(path) + "/" + method
	for i, p := range o.Parameters {
		where := fmt.Sprintf("%s/parameters/%d", at, i)
		if name, ok := strings.CutPrefix(p.Ref, "#/components/parameters/"); ok {
			p, where = d.Components.Parameters[name], "/components/parameters/"+name
		}
		if p.In != "query" {
			continue
		}
		schema, err := schemas.at(where + "/schema")
		if err != nil {
			return op, err
		}
		op.Query = append(op.Query, Parameter{Name: p.Name, kind: p.Schema.Type, schema: schema, required: p.Required,
			repeated: p.Schema.Type == "array" && (p.Explode == nil || *p.Explode)})
	}
	if o.RequestBody == nil {
		return op, nil
	}
	var err error
	op.BodyRequired = o.RequestBody.Required
	op.Body, err = schemas.at(at + "/requestBody/content/" + escape("application/json") + "/schema")
	return op, err
}

// escape makes a JSON pointer's part (RFC 6901, section 3) as a URI's fragment has it.
func escape(part string) string {
	return strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D").Replace(part)
}

// schemas compiles the schemas of the document.
type schemas struct {
	compiler *jsonschema.Compiler
	document any
}

const location = "berth:openapi"

func newSchemas(raw []byte) (*schemas, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	s := &schemas{compiler: jsonschema.NewCompiler(), document: doc}
	s.compiler.DefaultDraft(jsonschema.Draft2020)
	s.compiler.AssertFormat()
	return s, s.compiler.AddResource(location, doc)
}

// at returns the schema at a JSON pointer.
func (s *schemas) at(pointer string) (*Schema, error) {
	compiled, err := s.compiler.Compile(location + "#" + pointer)
	if err != nil {
		return nil, fmt.Errorf("schema at %s: %w", pointer, err)
	}
	schema := s.lookup("#" + pointer)
	return &Schema{compiled: compiled, quick: quickOf(compiled, 0), refused: s.refusals(schema), data: s.dataOf(schema, 0)}, nil
}

// lookup returns the value at a reference within the document, nil if there is none.
func (s *schemas) lookup(ref string) any {
	value := s.document
	for part := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
		object, _ := value.(map[string]any)
		value = object[strings.NewReplacer("%7B", "{", "%7D", "}", "~1", "/", "~0", "~").Replace(part)]
	}
	return value
}

// dataOf collects the strings of a schema that may have any character. It returns nil for none.
func (s *schemas) dataOf(schema any, depth int) *data {
	object, _ := schema.(map[string]any)
	if object == nil || depth == deepest {
		return nil
	}
	if ref, ok := object["$ref"].(string); ok {
		return s.dataOf(s.lookup(ref), depth+1)
	}
	d := &data{
		properties: map[string]*data{},
		others:     s.dataOf(object["additionalProperties"], depth+1), items: s.dataOf(object["items"], depth+1),
	}
	d.every, _ = object["x-berth-data"].(bool)
	properties, _ := object["properties"].(map[string]any)
	for name, property := range properties {
		if inner := s.dataOf(property, depth+1); inner != nil {
			d.properties[name] = inner
		}
	}
	if !d.every && d.others == nil && d.items == nil && len(d.properties) == 0 {
		return nil
	}
	return d
}

// refusals collects what the properties of an object schema refuse. It returns nil for nothing.
func (s *schemas) refusals(schema any) *refusal {
	object, _ := schema.(map[string]any)
	if ref, ok := object["$ref"].(string); ok {
		return s.refusals(s.lookup(ref))
	}
	r := &refusal{properties: map[string]*refusal{}}
	r.advice, _ = object["x-berth-refused"].(string)
	r.accepted, _ = object["x-berth-accepted"].([]any)
	properties, _ := object["properties"].(map[string]any)
	for name, property := range properties {
		if inner := s.refusals(property); inner != nil {
			r.properties[name] = inner
			r.names = append(r.names, name)
		}
	}
	slices.Sort(r.names)
	if r.advice == "" && len(r.properties) == 0 {
		return nil
	}
	return r
}
