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
	Rules                []struct {
		Message string `json:"message"`
	} `json:"x-kubernetes-validations"`
}

const kubernetesAPI = "https://kubernetes.io/docs/reference/kubernetes-api/"

// foreign are the fields whose types belong to Kubernetes, with the names of these types.
var foreign = map[string]string{
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
	fmt.Fprintf(&out, "%s\n\nAPI version `%s/%s`, for kubectl `%s`.\n\n", cell(root.Description),
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
			fmt.Fprintf(&out, "- %s\n", cell(rule))
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
		typeName, ours := foreign[at]
		if !ours {
			typeName = field.typeName()
		}
		preset := ""
		switch {
		case field.Default != nil:
			preset = code(fmt.Sprint(field.Default))
		case slices.Contains(s.Required, name):
			preset = "required"
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s | %s |\n",
			code(at), typeName, preset, field.bounds(), cell(field.Description))
		if !ours {
			rules = append(rules, fieldRows(out, at, field)...)
		}
	}
	return rules
}

func (s schema) typeName() string {
	switch {
	case s.Type == "array" && s.Items != nil:
		return "list of " + s.Items.typeName()
	case s.Type == "object" && s.AdditionalProperties != nil:
		return "map of " + s.AdditionalProperties.typeName()
	case s.Format == "date-time" || s.Format == "byte":
		return s.Format
	}
	return s.Type
}

// bounds returns which values the API server takes.
func (s schema) bounds() string {
	var all []string
	between := func(low, high string, what string) {
		switch {
		case low != "" && high != "":
			all = append(all, low+" to "+high+what)
		case low != "":
			all = append(all, low+what+" or more")
		case high != "":
			all = append(all, "at most "+high+what)
		}
	}
	between(number(s.Minimum), number(s.Maximum), "")
	between(number(s.MinLength), number(s.MaxLength), " characters")
	between(number(s.MinItems), number(s.MaxItems), " items")
	if s.Items != nil {
		if each := s.Items.bounds(); each != "" {
			all = append(all, "each "+each)
		}
	}
	if len(s.Enum) > 0 {
		all = append(all, code(strings.Join(s.Enum, "`, `")))
	}
	if s.Pattern != "" {
		all = append(all, code(strings.ReplaceAll(s.Pattern, "|", `\|`)))
	}
	for _, rule := range s.Rules {
		if len(s.Properties) == 0 {
			all = append(all, cell(rule.Message))
		}
	}
	return strings.Join(all, "; ")
}

func number[T int | float64](n *T) string {
	if n == nil {
		return ""
	}
	return fmt.Sprintf("%.0f", float64(*n))
}
