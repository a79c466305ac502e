package docs

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// schema is the part of an OpenAPI v3 schema that the reference shows.
type schema struct {
	Description          string            `json:"description"`
	Type                 string            `json:"type"`
	Format               string            `json:"format"`
	Default              any               `json:"default"`
	Enum                 []string          `json:"enum"`
	Minimum              *float64          `json:"minimum"`
	Maximum              *float64          `json:"maximum"`
	MinLength            *int              `json:"minLength"`
	MaxLength            *int              `json:"maxLength"`
	MinItems             *int              `json:"minItems"`
	MaxItems             *int              `json:"maxItems"`
	Pattern              string            `json:"pattern"`
	Required             []string          `json:"required"`
	Properties           map[string]schema `json:"properties"`
	AdditionalProperties *schema           `json:"additionalProperties"`
	Items                *schema           `json:"items"`
	IntOrString          bool              `json:"x-kubernetes-int-or-string"`
	Rules                []struct {
		Message string `json:"message"`
	} `json:"x-kubernetes-validations"`
}

const kubernetesAPI = "https://kubernetes.io/docs/reference/kubernetes-api/"

// kubernetesTypes are the fields whose types belong to Kubernetes, with the names of these types.
var kubernetesTypes = map[string]string{
	"spec.template":     "[PodTemplateSpec](" + kubernetesAPI + "workload-resources/pod-template-v1/#PodTemplateSpec)",
	"status.conditions": "list of [Condition](" + kubernetesAPI + "common-definitions/condition/)",
}

// CRD describes the fields of a custom resource in Markdown. The argument is the YAML of
// its CustomResourceDefinition.
func CRD(definition []byte) (string, error) {
	var crd struct {
		Spec struct {
			Group string `json:"group"`
			Names struct {
				Kind       string   `json:"kind"`
				Plural     string   `json:"plural"`
				ShortNames []string `json:"shortNames"`
			} `json:"names"`
			Versions []struct {
				Name   string `json:"name"`
				Schema struct {
					OpenAPIV3Schema schema `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(definition, &crd); err != nil {
		return "", err
	}
	if len(crd.Spec.Versions) != 1 {
		return "", fmt.Errorf("%d versions: the reference shows one", len(crd.Spec.Versions))
	}
	version, names := crd.Spec.Versions[0], crd.Spec.Names
	root := version.Schema.OpenAPIV3Schema
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n\nAPI version `%s/%s`, for kubectl `%s`.\n\n", Cell(root.Description),
		crd.Spec.Group, version.Name, strings.Join(append([]string{names.Plural}, names.ShortNames...), "`, `"))
	out.WriteString("| field | type | default | range | meaning |\n|---|---|---|---|---|\n")
	var rules []string
	for _, part := range []string{"spec", "status"} {
		if s, ok := root.Properties[part]; ok {
			rules = append(rules, fieldRows(&out, part, s)...)
		}
	}
	if len(rules) > 0 {
		out.WriteString("\nThe API server also checks:\n\n")
		for _, rule := range rules {
			fmt.Fprintf(&out, "- %s\n", Cell(rule))
		}
	}
	return out.String(), nil
}

// fieldRows writes a row for each field below path, and returns the messages of the rules.
func fieldRows(out *strings.Builder, path string, s schema) []string {
	var rules []string
	for _, rule := range s.Rules {
		rules = append(rules, rule.Message)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		field, at := s.Properties[name], path+"."+name
		typeName, foreign := kubernetesTypes[at]
		if !foreign {
			typeName = typeOf(field)
		}
		preset := ""
		switch {
		case field.Default != nil:
			preset = code(fmt.Sprint(field.Default))
		case slices.Contains(s.Required, name):
			preset = "required"
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s | %s |\n", code(at), typeName, preset, bounds(field), Cell(field.Description))
		if !foreign {
			rules = append(rules, fieldRows(out, at, field)...)
		}
	}
	return rules
}

func typeOf(s schema) string {
	switch {
	case s.Items != nil:
		return "list of " + typeOf(*s.Items)
	case s.AdditionalProperties != nil:
		return "map of " + typeOf(*s.AdditionalProperties)
	case s.IntOrString: // the pattern is that of every quantity
		return "quantity"
	case s.Format == "date-time" || s.Format == "byte":
		return s.Format
	}
	return s.Type
}

// bounds returns which values the API server takes.
func bounds(s schema) string {
	all := []string{
		between(s.Minimum, s.Maximum, ""),
		between(s.MinLength, s.MaxLength, " characters"),
		between(s.MinItems, s.MaxItems, " items"),
	}
	if s.Items != nil {
		if each := bounds(*s.Items); each != "" {
			all = append(all, "each "+each)
		}
	}
	if s.IntOrString {
		s.Pattern = ""
	}
	all = append(all, code(strings.Join(s.Enum, "`, `")), code(strings.ReplaceAll(s.Pattern, "|", `\|`)))
	for _, rule := range s.Rules {
		if len(s.Properties) == 0 {
			all = append(all, Cell(rule.Message))
		}
	}
	return strings.Join(slices.DeleteFunc(all, func(b string) bool { return b == "" }), "; ")
}

func between[T int | float64](low, high *T, what string) string {
	switch {
	case low != nil && high != nil:
		return fmt.Sprintf("%.0f to %.0f%s", float64(*low), float64(*high), what)
	case low != nil:
		return fmt.Sprintf("%.0f%s or more", float64(*low), what)
	case high != nil:
		return fmt.Sprintf("at most %.0f%s", float64(*high), what)
	}
	return ""
}
