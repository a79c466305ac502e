package options_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/options"
)

func TestRequireNamesEachMissingField(t *testing.T) {
	t.Parallel()
	type watcher struct {
		Client func()
		Name   string
		Period time.Duration
		Extra  int
	}
	require.EqualError(t, options.Require(watcher{Period: -1}, "Client", "Name", "Period"),
		"options_test.watcher.Client is required\noptions_test.watcher.Name is required\noptions_test.watcher.Period is required")
	require.NoError(t, options.Require(watcher{Client: func() {}, Name: "a", Period: 1}, "Client", "Name", "Period"))
	require.Panics(t, func() { _ = options.Require(watcher{}, "Unknown") })
}
