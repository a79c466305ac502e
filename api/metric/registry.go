package metric

import (
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Registry has the metrics of one program, and those of Go and of the process. It may be used concurrently.
type Registry struct {
	*prometheus.Registry
	of Program

	mu         sync.Mutex
	registered map[string]bool // rows, by name
}

// NewRegistry returns a registry that has none of the rows yet.
func NewRegistry(of Program) *Registry {
	r := &Registry{Registry: prometheus.NewRegistry(), of: of, registered: map[string]bool{}}
	r.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Register implements prometheus.Registerer. It returns an error for a collector that describes something else than
// rows of the program.
func (r *Registry) Register(c prometheus.Collector) error {
	var names []string
	for _, d := range described(c) {
		row := r.row(d)
		if row == nil {
			return fmt.Errorf("the table of package metric has no such row of %s: %v", r.of, d)
		}
		names = append(names, row.Name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range names {
		r.registered[name] = true
	}
	return r.Registry.Register(c)
}

// MustRegister implements prometheus.Registerer.
func (r *Registry) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		if err := r.Register(c); err != nil {
			panic(err)
		}
	}
}

// Missing returns the names of the rows of the program that are not registered.
func (r *Registry) Missing() (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, row := range Table(r.of) {
		if !r.registered[row.Name] {
			names = append(names, row.Name)
		}
	}
	return names
}

// row returns the row of the program that a description is of. The text of a description has the name, the meaning and
// the labels.
func (r *Registry) row(d *prometheus.Desc) *Row {
	for _, row := range rows {
		if row.Program == r.of && row.Desc.String() == d.String() {
			return row
		}
	}
	return nil
}

func described(c prometheus.Collector) (all []*prometheus.Desc) {
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		c.Describe(descs)
	}()
	for d := range descs {
		all = append(all, d)
	}
	return all
}
