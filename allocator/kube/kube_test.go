package kube_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/allocator/kube"
)

// Items of two lists mixed would show what is gone, and some of it twice.
func TestListStartsAgainWhenItsSnapshotExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type page struct {
			items []string
			next  string
			err   error
		}
		pages := []page{
			{items: []string{"gone", "a"}, next: "1"},
			{err: errors.New("no connection")}, // a page that fails is asked for again
			{items: []string{"b"}, next: "2"},
			{err: apierrors.NewResourceExpired("the list is too old")},
			{items: []string{"a", "b"}, next: "3"},
			{items: []string{"c"}},
		}
		var asked []string
		failed := 0
		all, err := kube.List(t.Context(), func(_ context.Context, next string) ([]string, string, error) {
			asked = append(asked, next)
			p := pages[0]
			pages = pages[1:]
			return p.items, p.next, p.err
		}, func(error) { failed++ })
		require.NoError(t, err)
		require.Equal(t, []string{"a", "b", "c"}, all)
		require.Equal(t, []string{"", "1", "1", "2", "", "3"}, asked)
		require.Equal(t, 2, failed)
	})
}
