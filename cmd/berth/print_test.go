package main

import (
	"bytes"
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

type thing struct{ name, state, age string }

var things = view[thing]{
	name: func(x thing) string { return x.name },
	columns: []column[thing]{
		{name: "NAME", text: func(x thing) string { return x.name }},
		{name: "STATE", text: func(x thing) string { return x.state }},
		{name: "AGE", ticks: true, text: func(x thing) string { return x.age }},
	},
}

func TestWatchPrintsOnlyWhatIsNewOrChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := [][]thing{
			{{"a", "starting", "1s"}, {"b", "running", "1s"}},
			{{"a", "running", "2s"}, {"b", "running", "2s"}},
			{{"b", "running", "3s"}},
			{{"a", "running", "4s"}, {"b", "running", "4s"}},
		}
		ctx, cancel := context.WithCancel(t.Context())
		var out bytes.Buffer
		err := watch(ctx, newOutput(&out, &out, time.Now), formatFlags{Output: "table"}, watchFlags{Interval: time.Second}, things, func() ([]thing, error) {
			look := looks[0]
			if looks = looks[1:]; len(looks) == 0 {
				cancel()
			}
			return look, nil
		}, nil)
		require.NoError(t, err)
		require.Equal(t, "NAME  STATE     AGE\na     starting  1s\nb     running   1s\na     running   2s\na     running   4s\n", out.String())
	})
}

// A sandbox that lives for less than the interval is seen, because its event causes a look.
func TestWatchLooksAtOnceAfterAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began, looks := time.Now(), []time.Duration{}
		changes := make(chan struct{}, 1)
		err := watch(ctx, newOutput(io.Discard, io.Discard, time.Now), formatFlags{Output: "table"}, watchFlags{Interval: time.Minute}, things, func() ([]thing, error) {
			switch looks = append(looks, time.Since(began)); len(looks) {
			case 1:
				time.AfterFunc(time.Second, func() { changes <- struct{}{} })
			case 2:
				changes <- struct{}{} // during the look
			case 4:
				cancel()
			}
			return nil, nil
		}, changes)
		require.NoError(t, err)
		require.Equal(t, []time.Duration{0, time.Second, time.Second + leastInterval, time.Minute + time.Second + leastInterval}, looks)
	})
}

func TestControlCharactersDoNotReachTheTerminal(t *testing.T) {
	var out bytes.Buffer
	err := show(newOutput(&out, &out, time.Now), formatFlags{Output: "table", NoHeaders: true}, things, []thing{{"a\x1b[2Jb\u009b", "é", ""}}, nil)
	require.NoError(t, err)
	require.Equal(t, `a\u001b[2Jb\u009b  é  -`+"\n", out.String())
}
