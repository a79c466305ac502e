package core_test

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/guard"
)

var _ = func() bool {
	core.NewWatcher = func(window time.Duration) core.Watcher { return watcher{guard.New(window)} }
	return true
}()

type watcher struct{ *guard.Guard }

func (w watcher) Check(now time.Duration, ev core.Event, effects []core.Effect) (all []string) {
	_, violations := w.Step(now, ev, effects)
	for _, v := range violations {
		all = append(all, v.String())
	}
	return all
}
