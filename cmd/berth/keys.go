package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

type keysCommand struct {
	Create keysCreateCommand `cmd:"" help:"Make an API key, and print it once."`
	List   keysListCommand   `cmd:"" help:"List the API keys."`
	Revoke keysRevokeCommand `cmd:"" help:"Delete an API key; calls with it are refused from then on."`
}

// keysFlags say where the Secrets of the keys are.
type keysFlags struct {
	Namespace  string        `short:"n" default:"berth-system-keys" help:"Namespace of the keys: the allocators' --api-keys-namespace (api.keysNamespace of the chart)."`
	Kubeconfig string        `help:"Kubeconfig file. Left out: KUBECONFIG, the current context's, kubectl's own, or a development cluster's."`
	Timeout    time.Duration `default:"30s" help:"How long it may take."`
}

// secrets returns the client, and a context for all its calls.
func (f *keysFlags) secrets(ctx context.Context) (typedcorev1.SecretInterface, context.Context, context.CancelFunc, error) {
	at := journalFlags{Kubeconfig: f.Kubeconfig}
	clients, err := at.clients()
	if err != nil {
		return nil, nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	return clients.Kubernetes.CoreV1().Secrets(f.Namespace), ctx, cancel, nil
}

type keysCreateCommand struct {
	keysFlags
	Name string `required:"" help:"Name of the key: that of its Secret, and what audit lines say."`
	Team string `required:"" help:"Team whose sandboxes the key sees: lower-case letters, digits and -."`
	Role string `default:"member" enum:"admin,member,read-only" help:"member: claims, reads, changes and releases the team's sandboxes. read-only: reads them. admin: every call, for every team."`
}

// Run implements the command. The key alone is on the standard output.
func (c *keysCreateCommand) Run(ctx context.Context, o *output) error {
	if why := validation.IsDNS1123Subdomain(c.Name); why != nil {
		return usage("--name %q: %s", c.Name, strings.Join(why, "; "))
	}
	key := access.NewKey()
	secret, err := access.NewSecret(key, access.Caller{Key: c.Name, Team: c.Team, Role: access.Role(c.Role)})
	if err != nil {
		return cli.WithExitCode(cli.ExitUsage, fmt.Errorf("--team, --role: %w", err))
	}
	secrets, ctx, cancel, err := c.secrets(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	switch _, err := secrets.Create(ctx, secret, metav1.CreateOptions{}); {
	case apierrors.IsAlreadyExists(err):
		return fmt.Errorf("--name %s: there is a Secret of this name in the namespace %s: choose another name, or revoke the key first", c.Name, c.Namespace)
	case err != nil:
		return fmt.Errorf("create the Secret %s: %w", c.Name, err)
	}
	_, err = fmt.Fprintf(o.err, "key %s of team %s, role %s; it is shown only now:\n", c.Name, c.Team, c.Role)
	_, err2 := fmt.Fprintln(o.out, key)
	return errors.Join(err, err2)
}

// listedKey is a key as "berth keys list -o json" shows it.
type listedKey struct {
	Name      string      `json:"name"`
	Team      string      `json:"team"`
	Role      access.Role `json:"role"`
	CreatedAt time.Time   `json:"createdAt"`
	// Refused is why the Secret opens nothing, absent for a good one.
	Refused string `json:"refused,omitempty"`
}

var shownKeys = view[listedKey]{
	columns: []column[listedKey]{
		{name: "NAME", text: func(k listedKey) string { return k.Name }},
		{name: "TEAM", text: func(k listedKey) string { return k.Team }},
		{name: "ROLE", text: func(k listedKey) string { return string(k.Role) }},
		{name: "CREATED", text: func(k listedKey) string { return k.CreatedAt.Format(time.RFC3339) }},
		{name: "REFUSED", text: func(k listedKey) string { return k.Refused }},
	},
	name: func(k listedKey) string { return k.Name },
}

type keysListCommand struct {
	keysFlags
	formatFlags
}

// Run implements the command.
func (c *keysListCommand) Run(ctx context.Context, o *output) error {
	secrets, ctx, cancel, err := c.secrets(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	list, err := secrets.List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("type", string(access.SecretType)).String(),
	})
	if err != nil {
		return fmt.Errorf("list the Secrets of type %s: %w", access.SecretType, err)
	}
	keys := make([]listedKey, 0, len(list.Items))
	for i := range list.Items {
		keys = append(keys, toListedKey(&list.Items[i]))
	}
	return show(o, c.formatFlags, shownKeys, keys, keys)
}

func toListedKey(s *corev1.Secret) listedKey {
	caller, err := access.CallerOf(s)
	k := listedKey{Name: s.Name, Team: caller.Team, Role: caller.Role, CreatedAt: s.CreationTimestamp.UTC()}
	switch {
	case err != nil:
		k.Refused = strings.ReplaceAll(err.Error(), "\n", "; ")
	case s.DeletionTimestamp != nil:
		k.Refused = "it is being deleted"
	}
	return k
}

type keysRevokeCommand struct {
	keysFlags
	Name string `arg:"" help:"Name of the key."`
}

// Run implements the command. It deletes the Secret that it has read, and no other one that has
// taken its name meanwhile.
func (c *keysRevokeCommand) Run(ctx context.Context, o *output) error {
	secrets, ctx, cancel, err := c.secrets(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	s, err := secrets.Get(ctx, c.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return cli.WithExitCode(exitNotFound, fmt.Errorf("there is no key %s in the namespace %s: berth keys list shows them", c.Name, c.Namespace))
	case err != nil:
		return fmt.Errorf("read the Secret %s: %w", c.Name, err)
	case s.Type != access.SecretType:
		return fmt.Errorf("the Secret %s is of type %s, and no API key: berth keys list shows the keys", c.Name, s.Type)
	}
	err = secrets.Delete(ctx, c.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(s.UID))})
	switch {
	case apierrors.IsConflict(err):
		return fmt.Errorf("the key %s was replaced by another one in this moment: see berth keys list, and try again", c.Name)
	case err != nil && !apierrors.IsNotFound(err): // another revocation was first
		return fmt.Errorf("delete the Secret %s: %w", c.Name, err)
	}
	_, err = fmt.Fprintf(o.out, "key %s of team %s is revoked\n", c.Name, s.Data["team"])
	return err
}
