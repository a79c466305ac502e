// Package openapi has the OpenAPI document of Berth's HTTP API, and what is made from it: the types
// of requests and answers, a plain client (package client wraps it), and the validation of
// requests.
//
// openapi.yaml is the source. "make generate" writes openapi.gen.go from it. Load reads the
// document when the server starts: its calls, their parameters and the JSON Schemas of their
// bodies.
//
// # Guarantees
//
//   - A value that is not in the document is refused and never ignored. The error names the field
//     or parameter.
//   - A property with x-berth-refused is refused with its advice, unless its value asks for nothing.
package openapi
