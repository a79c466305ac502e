package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/internal/controltls"
)

type certsCommand struct {
	Ensure certsEnsureCommand `cmd:"" help:"Make the Secrets for mutual TLS between routers and allocators, or renew them when half of their ten years is over."`
}

type certsEnsureCommand struct {
	Namespace       string        `required:"" help:"Namespace of the Secrets."`
	CASecret        string        `name:"ca-secret" required:"" help:"Secret that keeps the certificate authority. No pod needs it."`
	AllocatorSecret string        `required:"" help:"Secret for the allocators: tls.crt, tls.key, ca.crt."`
	RouterSecret    string        `required:"" help:"Secret for the routers: tls.crt, tls.key, ca.crt."`
	EgressSecret    string        `help:"Secret for the egress routers: tls.crt, tls.key, ca.crt. Empty: none is made."`
	Kubeconfig      string        `help:"Kubeconfig file. Empty: the service account of the pod this runs in."`
	Timeout         time.Duration `default:"1m" help:"How long all of it may take."`
}

// Run implements the command. It can be repeated, also concurrently: it changes no valid Secret.
func (c *certsEnsureCommand) Run(ctx context.Context, o *output) error {
	secrets := []string{c.CASecret, c.AllocatorSecret, c.RouterSecret, c.EgressSecret}
	slices.Sort(secrets)
	if len(slices.Compact(secrets)) != 4 {
		return errors.New("--ca-secret, --allocator-secret, --router-secret and --egress-secret: must be different Secrets")
	}
	config, err := kube.Config(c.Kubeconfig)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	k := keeper{secrets: clients.CoreV1().Secrets(c.Namespace), o: o, now: time.Now()}
	return k.all(ctx, c.CASecret, c.AllocatorSecret, c.RouterSecret, c.EgressSecret)
}

// keeper keeps certificates in Secrets.
type keeper struct {
	secrets typedcorev1.SecretInterface
	o       *output
	now     time.Time
}

// maxConflicts bounds how often another writer may be first.
const maxConflicts = 10

// all keeps all of them. egress may be "".
func (k keeper) all(ctx context.Context, ca, allocator, router, egress string) error {
	a, err := k.authority(ctx, ca)
	if err != nil {
		return err
	}
	if err := k.certificate(ctx, a, allocator, controltls.AllocatorName); err != nil {
		return err
	}
	if err := k.certificate(ctx, a, router, controltls.RouterName); err != nil || egress == "" {
		return err
	}
	return k.certificate(ctx, a, egress, controltls.EgressName)
}

func (k keeper) authority(ctx context.Context, secret string) (a *controltls.Authority, err error) {
	err = k.ensure(ctx, secret, func(f controltls.Files) (bool, error) {
		a, err = controltls.ParseAuthority(f.Cert, f.Key)
		if err != nil {
			return false, err
		}
		return a.Fresh(k.now), nil
	}, func() (controltls.Files, error) {
		if a, err = controltls.NewAuthority(k.now); err != nil {
			return controltls.Files{}, err
		}
		return a.Files()
	})
	return a, err
}

func (k keeper) certificate(ctx context.Context, a *controltls.Authority, secret, name string) error {
	return k.ensure(ctx, secret, func(f controltls.Files) (bool, error) {
		return a.Good(f, name, k.now), nil
	}, func() (controltls.Files, error) { return a.Issue(name, k.now) })
}

// managed marks the Secrets that may be written again.
const managed = "berth-certs"

// ensure creates a Secret, or writes it again unless good accepts it. It does not touch a Secret
// that another program made.
func (k keeper) ensure(ctx context.Context, name string, good func(controltls.Files) (bool, error), issue func() (controltls.Files, error)) error {
	for range maxConflicts {
		present, err := k.secrets.Get(ctx, name, metav1.GetOptions{})
		missing := apierrors.IsNotFound(err)
		switch {
		case missing:
			present = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": managed}}, Type: corev1.SecretTypeTLS}
		case err != nil:
			return fmt.Errorf("read Secret %s: %w", name, err)
		case present.Labels["app.kubernetes.io/managed-by"] != managed:
			return fmt.Errorf("the Secret %s was not made by this command: delete it, or let the installation use it as it is", name)
		default:
			ok, err := good(controltls.Files{Cert: present.Data[controltls.CertFile], Key: present.Data[controltls.KeyFile], CA: present.Data[controltls.CAFile]})
			if err != nil {
				return fmt.Errorf("the Secret %s cannot be used: %w; delete it to have it made again", name, err)
			}
			if ok {
				_, err := fmt.Fprintf(k.o.out, "Secret %s is good\n", name)
				return err
			}
		}
		f, err := issue()
		if err != nil {
			return fmt.Errorf("make certificate for Secret %s: %w", name, err)
		}
		present.Data = map[string][]byte{controltls.CertFile: f.Cert, controltls.KeyFile: f.Key, controltls.CAFile: f.CA}
		if missing {
			_, err = k.secrets.Create(ctx, present, metav1.CreateOptions{})
		} else {
			_, err = k.secrets.Update(ctx, present, metav1.UpdateOptions{}) // under the version that was read
		}
		switch {
		case apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err):
			continue // another writer was first
		case err != nil:
			return fmt.Errorf("write Secret %s: %w", name, err)
		}
		_, err = fmt.Fprintf(k.o.out, "Secret %s is written\n", name)
		return err
	}
	return fmt.Errorf("write Secret %s: it is changed by others again and again", name)
}
