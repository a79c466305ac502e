package allocator

import (
	"context"
	"maps"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// auditEvery is the pause between audits.
	auditEvery = 5 * time.Minute
	// auditWait is the time in which the watches can deliver the changes that a list has shown.
	auditWait = 5 * time.Second
	// auditAge is the minimum age of a pod that the watches must know. A younger pod may come and
	// go during the audit.
	auditAge = time.Minute
)

// picture is the core's state, for comparison with a listing.
type picture struct {
	pods    map[core.PodKey]string  // resource versions
	pools   map[core.PoolKey]string // resource versions
	nodes   map[string]bool         // the usable nodes
	records map[string]bool         // the sandboxes whose object counts as written
}

// listing is the content of the API server.
type listing struct {
	pods    []core.Pod
	pools   []core.Pool
	version string // of the pools
	nodes   []string
	records sandboxobjects.Listed
}

// repair is an event that a watch should have delivered.
type repair struct {
	what, name string
	ev         core.Event
}

// audit compares the core with the API server every auditEvery until ctx ends, and submits what the
// watches missed. Otherwise a lost event would stay lost until the next leader.
func (t *term) audit(ctx context.Context) {
	for wait.Sleep(ctx, auditEvery) {
		before, err := t.picture(ctx)
		if err != nil {
			continue
		}
		l, err := t.list(ctx)
		if err != nil {
			continue
		}
		wait.Sleep(ctx, auditWait)
		after, err := t.picture(ctx)
		if err != nil {
			continue
		}
		for _, r := range repairs(before, after, l, t.a.o.WallClock()) {
			t.report(r.what+", which no watch has reported", zap.String("name", r.name))
			t.Submit(r.ev)
		}
	}
}

func (t *term) list(ctx context.Context) (l listing, err error) {
	w := t.a.watches
	if l.records, err = w.records.List(ctx); err != nil {
		return l, err
	}
	if l.pools, l.version, err = w.pools.List(ctx); err != nil {
		return l, err
	}
	if l.nodes, _, err = w.nodes.List(ctx); err != nil {
		return l, err
	}
	l.pods, _, err = w.pods.List(ctx)
	return l, err
}

func (t *term) picture(ctx context.Context) (picture, error) {
	p, _, err := ask(ctx, t, func(c core.View) (picture, bool) {
		p := picture{
			pods: map[core.PodKey]string{}, pools: maps.Clone(t.loop.pools),
			nodes: map[string]bool{}, records: map[string]bool{},
		}
		for _, key := range c.PodKeys() {
			p.pods[key.Whole()] = t.loop.versions[key.Whole()]
		}
		for key := range p.pools {
			if _, ok := c.Counts(key); !ok {
				delete(p.pools, key)
			}
		}
		for _, name := range c.UsableNodes() {
			p.nodes[name] = true
		}
		for _, id := range c.ObjectsWritten() {
			p.records[id] = true
		}
		return p, true
	})
	return p, err
}

// repairs returns the differences between the listing and both pictures. before is from before the
// listing, after from auditWait after it.
func repairs(before, after picture, l listing, now time.Time) (all []repair) {
	pods := map[core.PodKey]bool{}
	for _, p := range l.pods {
		key := p.Key.Whole()
		pods[key] = true
		_, known := after.pods[key]
		_, wasKnown := before.pods[key]
		switch {
		case !known && !wasKnown && p.Pool != "" && now.Sub(p.CreatedAt) > auditAge:
			all = append(all, repair{"a pod exists", p.Key.Name, core.PodSeen{Pod: p}})
		case known && wasKnown && before.pods[key] == after.pods[key] && kube.Older(after.pods[key], p.Version):
			all = append(all, repair{"a pod has changed", p.Key.Name, core.PodSeen{Pod: p}})
		}
	}
	for key := range before.pods {
		if _, known := after.pods[key]; known && !pods[key] {
			all = append(all, repair{"a pod is gone", key.Name, core.PodGone{Key: key}})
		}
	}
	pools := map[core.PoolKey]bool{}
	for _, p := range l.pools {
		pools[p.Key] = true
		if before.pools[p.Key] == after.pools[p.Key] && (after.pools[p.Key] == "" || kube.Older(after.pools[p.Key], p.Version)) {
			all = append(all, repair{"a pool exists or has changed", p.Key.Name, core.PoolSeen{Pool: p}})
		}
	}
	for key, version := range before.pools {
		if after.pools[key] == version && !pools[key] && kube.Older(version, l.version) {
			all = append(all, repair{"a pool is gone", key.Name, core.PoolGone{Key: key, Version: l.version}})
		}
	}
	nodes := map[string]bool{}
	for _, name := range l.nodes {
		nodes[name] = true
		if !before.nodes[name] && !after.nodes[name] {
			all = append(all, repair{"a node is usable", name, core.NodeSeen{Name: name, Usable: true}})
		}
	}
	for name := range before.nodes {
		if after.nodes[name] && !nodes[name] {
			all = append(all, repair{"a node is not usable", name, core.NodeSeen{Name: name}})
		}
	}
	records := map[string]bool{}
	for _, s := range l.records.Sandboxes {
		records[s.ID] = true
	}
	for id := range l.records.Unreadable {
		records[id] = true
	}
	for id := range before.records {
		if after.records[id] && !records[id] {
			all = append(all, repair{"the object of a sandbox is gone", sandboxid.Short(id), core.ObjectGone{ID: id}})
		}
	}
	return all
}
