package allocator

import (
	"context"
	"maps"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

const (
	// auditEvery is the pause between audits.
	auditEvery = 5 * time.Minute
	// auditWait is how long the watches are given to tell what a listing has shown.
	auditWait = 5 * time.Second
	// auditAge is how old a pod is at least that they should have told of: one that
	// is younger may come and go during the audit.
	auditAge = time.Minute
)

// picture is what the core goes by.
type picture struct {
	pods    map[core.PodKey]string  // with the version it was seen at
	pools   map[core.PoolKey]string // likewise
	nodes   map[string]bool         // those that are usable
	records map[string]bool         // sandboxes whose object is said to be written
}

// listing is what is there.
type listing struct {
	pods    []core.Pod
	pools   []core.Pool
	version string // of the pools
	nodes   []string
	records sandboxobjects.Listed
}

// repair is something that the core should have been told by a watch.
type repair struct {
	what, name string
	ev         core.Event
}

// audit compares what the core goes by with what is there, now and then until ctx
// ends. Watches are trusted, but not for ever: an event that was lost, by whoever's
// fault, would otherwise stay lost until the next leader.
func (t *term) audit(ctx context.Context) {
	for sleep(ctx, auditEvery) {
		before, err := t.picture(ctx)
		if err != nil {
			continue
		}
		l, err := t.list(ctx)
		if err != nil {
			continue
		}
		sleep(ctx, auditWait)
		after, err := t.picture(ctx)
		if err != nil {
			continue
		}
		for _, r := range repairs(before, after, l, t.a.o.WallClock()) {
			t.report(r.what+", and no watch has said so", zap.String("name", r.name))
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
	if l.nodes, err = w.nodes.List(ctx); err != nil {
		return l, err
	}
	l.pods, _, err = w.pods.List(ctx)
	return l, err
}

func (t *term) picture(ctx context.Context) (picture, error) {
	ctx, cancel := context.WithTimeout(ctx, lookWait)
	defer cancel()
	found := make(chan picture, 1)
	err := t.loop.look(ctx, func(c *core.Core) {
		p := picture{pods: map[core.PodKey]string{}, pools: maps.Clone(t.loop.pools), nodes: map[string]bool{}, records: map[string]bool{}}
		for _, key := range c.PodKeys() {
			p.pods[key] = t.loop.versions[key]
		}
		for key := range p.pools {
			if _, ok := c.Counts(key); !ok {
				delete(p.pools, key)
			}
		}
		for _, name := range c.UsableNodes() {
			p.nodes[name] = true
		}
		for _, id := range c.Recorded() {
			p.records[id] = true
		}
		found <- p
	})
	if err != nil {
		return picture{}, err
	}
	return <-found, nil
}

// repairs says in what both pictures, from before a listing and from some time after
// it, differ from it.
func repairs(before, after picture, l listing, now time.Time) (all []repair) {
	pods := map[core.PodKey]bool{}
	for _, p := range l.pods {
		pods[p.Key] = true
		_, known := after.pods[p.Key]
		_, wasKnown := before.pods[p.Key]
		switch {
		case !known && !wasKnown && p.Pool != "" && now.Sub(p.CreatedAt) > auditAge:
			all = append(all, repair{"a pod is there", p.Key.Name, core.PodSeen{Pod: p}})
		case known && wasKnown && before.pods[p.Key] == after.pods[p.Key] && older(after.pods[p.Key], p.Version):
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
		if before.pools[p.Key] == after.pools[p.Key] && (after.pools[p.Key] == "" || older(after.pools[p.Key], p.Version)) {
			all = append(all, repair{"a pool is there, or has changed", p.Key.Name, core.PoolSeen{Pool: p}})
		}
	}
	for key, version := range before.pools {
		if after.pools[key] == version && !pools[key] && older(version, l.version) {
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
			all = append(all, repair{"the object of a sandbox is gone", sandboxid.Short(id), core.RecordGone{ID: id}})
		}
	}
	return all
}
