package credentials

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/secretwatch"
)

// SecretType is the type of the Secrets whose values pools may name.
const SecretType corev1.SecretType = "berth.sh/egress-credential"

// maxValues bounds the values of a cluster, so that what a router gets and holds is bounded: 4 MiB with the longest ones.
const maxValues = 1_000

// Name returns the name of the value under a key of a Secret.
func Name(secret, key string) string { return secret + "/" + key }

// Options configure Values. All are required.
type Options struct {
	Client kubernetes.Interface
	// Namespace is that of the Secrets.
	Namespace string
	Log       *zap.Logger
}

// Values are the values of a namespace. The methods may be called concurrently.
type Values struct {
	o       Options
	secrets *secretwatch.Secrets
	valid   atomic.Pointer[set]
}

// set is the values at one time. It is never changed.
type set struct {
	values  map[string]string // nil: they have not been read
	changed chan struct{}     // closed when another set is valid
}

// NewValues returns values that Run reads.
func NewValues(o Options) (*Values, error) {
	if err := options.Require(o, "Client", "Namespace", "Log"); err != nil {
		return nil, err
	}
	secrets, err := secretwatch.New(o.Client, o.Namespace, SecretType)
	if err != nil {
		return nil, err
	}
	v := &Values{o: o, secrets: secrets}
	v.valid.Store(&set{nil, make(chan struct{})})
	return v, nil
}

// Run keeps the values up to date until ctx ends.
func (v *Values) Run(ctx context.Context) {
	refused := map[string]string{}
	v.secrets.Run(ctx, func() { refused = v.load(refused) })
}

// All returns all values by name, and a channel that is closed when they have changed. The map is nil until the Secrets
// have been read, and must not be changed.
func (v *Values) All() (map[string]string, <-chan struct{}) {
	valid := v.valid.Load()
	return valid.values, valid.changed
}

// load replaces the values by those of the watched Secrets. It logs each that it refuses and that was not refused for the
// same reason before, and returns all refused ones.
func (v *Values) load(before map[string]string) (refused map[string]string) {
	refused = map[string]string{}
	values := map[string]string{}
	for _, s := range v.secrets.List() {
		for key, data := range s.Data {
			value := strings.TrimSpace(string(data)) // files end in a line end
			if err := policy.CheckHeaderValue(value); err != nil {
				refused[Name(s.Name, key)] = err.Error()
				continue
			}
			values[Name(s.Name, key)] = value
		}
	}
	names := slices.Sorted(maps.Keys(values))
	for _, name := range names[min(len(names), maxValues):] {
		delete(values, name)
		refused[name] = "there are more values than a gateway takes"
	}
	for _, name := range slices.Sorted(maps.Keys(refused)) {
		if before[name] != refused[name] {
			v.o.Log.Error("a value for the egress gateways is refused, so requests that need it are refused too",
				zap.String("credential", name), zap.String("why", refused[name]))
		}
	}
	if old := v.valid.Load(); old.values == nil || !maps.Equal(old.values, values) {
		v.valid.Store(&set{values, make(chan struct{})})
		close(old.changed)
	}
	return refused
}
