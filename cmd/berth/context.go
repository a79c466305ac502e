package main

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/url"

	"github.com/berth-sandbox/berth/cmd/internal/contexts"
)

type contextCommand struct {
	Ls     contextLsCommand     `cmd:"" help:"List contexts, and development clusters that run."`
	Use    contextUseCommand    `cmd:"" help:"Make a context the current one."`
	Set    contextSetCommand    `cmd:"" help:"Write a context to the configuration file. Flags that are left out keep their values. The first one becomes the current one."`
	Delete contextDeleteCommand `cmd:"" help:"Remove a context from the configuration file."`
}

// known is a row of the list of contexts.
type known struct {
	Name    string `json:"name"`
	Current bool   `json:"current"`
	// Development says that it is a development cluster that runs.
	Development      bool `json:"development"`
	contexts.Context `json:",inline"`
}

var knownContexts = view[known]{
	name: func(k known) string { return k.Name },
	columns: []column[known]{
		{name: "CURRENT", text: func(k known) string {
			if k.Current {
				return "*"
			}
			return " "
		}},
		{name: "NAME", text: func(k known) string { return k.Name }},
		{name: "API", text: func(k known) string { return k.APIURL }},
		{name: "GATEWAY", text: func(k known) string { return k.Gateway }},
		{name: "SOURCE", text: func(k known) string {
			if k.Development {
				return "development cluster"
			}
			return "configuration file"
		}},
		{name: "KEY FILE", wide: true, text: func(k known) string { return k.APIKeyFile }},
		{name: "CA FILE", wide: true, text: func(k known) string { return k.CAFile }},
		{name: "KUBECONFIG", wide: true, text: func(k known) string { return k.Kubeconfig }},
		{name: "NAMESPACE", wide: true, text: func(k known) string { return k.Namespace }},
	},
}

type contextLsCommand struct{ formatFlags }

// Run implements the command.
func (c *contextLsCommand) Run(o *output) error {
	file, _, err := configuration()
	if err != nil {
		return err
	}
	development, err := contexts.Development()
	if err != nil {
		return err
	}
	current := file.Current
	if current == "" && len(development) == 1 {
		current = contexts.Names(development)[0]
	}
	all := maps.Clone(development)
	maps.Copy(all, file.Contexts) // the file comes first
	rows := []known{}
	for _, name := range contexts.Names(all) {
		_, written := file.Contexts[name]
		rows = append(rows, known{Name: name, Current: name == current, Development: !written, Context: all[name]})
	}
	return show(o, c.formatFlags, knownContexts, rows, rows)
}

type contextUseCommand struct {
	Name string `arg:"" complete:"context" help:"Name of the context."`
}

// Run implements the command.
func (c *contextUseCommand) Run(o *output) error {
	file, path, err := configuration()
	if err != nil {
		return err
	}
	file.Current = c.Name
	if _, ok := file.Contexts[c.Name]; !ok {
		development, err := contexts.Development()
		if err != nil {
			return err
		}
		if _, ok := development[c.Name]; !ok {
			return usage("no context %q in %s; make one with berth context set, see berth context ls", c.Name, path)
		}
	}
	if err := file.Save(path); err != nil {
		return err
	}
	_, err = fmt.Fprintf(o.out, "%s is the current context\n", c.Name)
	return err
}

type contextSetCommand struct {
	Name       string  `arg:"" complete:"context" help:"Name of the context."`
	APIURL     *string `name:"api-url" help:"URL of the HTTP API."`
	APIKeyFile *string `name:"api-key-file" help:"File with the key for the API."`
	CAFile     *string `name:"ca-file" help:"File with certificates, in PEM, to trust besides the system's."`
	Gateway    *string `help:"host:port to connect to for sandboxes, where their names do not resolve."`
	Kubeconfig *string `help:"Kubeconfig file for the commands that read the cluster."`
	Namespace  *string `short:"n" help:"Namespace of the sandboxes, for the commands that read the cluster."`
}

// Run implements the command.
func (c *contextSetCommand) Run(o *output) error {
	file, path, err := configuration()
	if err != nil {
		return err
	}
	kept := file.Contexts[c.Name]
	for _, f := range []struct {
		from *string
		into *string
	}{{c.APIURL, &kept.APIURL}, {c.APIKeyFile, &kept.APIKeyFile}, {c.CAFile, &kept.CAFile}, {c.Gateway, &kept.Gateway},
		{c.Kubeconfig, &kept.Kubeconfig}, {c.Namespace, &kept.Namespace}} {
		if f.from != nil {
			*f.into = *f.from
		}
	}
	if u, err := url.Parse(kept.APIURL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return usage("--api-url %q: must be a URL such as https://api.sandbox.example.com", kept.APIURL)
	}
	if _, _, err := net.SplitHostPort(kept.Gateway); kept.Gateway != "" && err != nil {
		return usage("--gateway %q: must be host:port", kept.Gateway)
	}
	if file.Contexts == nil {
		file.Contexts = map[string]contexts.Context{}
	}
	file.Contexts[c.Name] = kept
	first := file.Current == ""
	file.Current = cmp.Or(file.Current, c.Name)
	if err := file.Save(path); err != nil {
		return err
	}
	text := fmt.Sprintf("context %s is in %s", c.Name, path)
	switch {
	case first:
		text += "; it is the current one now, also instead of a development cluster (berth context delete " + c.Name + " undoes this)"
	case file.Current != c.Name:
		text += "; the current one is still " + file.Current
	}
	_, err = fmt.Fprintln(o.out, text)
	return err
}

type contextDeleteCommand struct {
	Name string `arg:"" complete:"context" help:"Name of the context."`
}

// Run implements the command.
func (c *contextDeleteCommand) Run(o *output) error {
	file, path, err := configuration()
	if err != nil {
		return err
	}
	if _, ok := file.Contexts[c.Name]; !ok && file.Current != c.Name {
		return usage("no context %q in %s; see berth context ls", c.Name, path)
	}
	delete(file.Contexts, c.Name)
	text := c.Name + " is deleted"
	if file.Current == c.Name {
		file.Current = ""
		text += "; no context is current now"
	}
	if err := file.Save(path); err != nil {
		return err
	}
	_, err = fmt.Fprintln(o.out, text)
	return err
}
