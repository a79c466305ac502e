package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// An ablation of a part that Berth has no longer would measure nothing.
func TestEveryAblationChangesTheConfiguration(t *testing.T) {
	for _, c := range ablations() {
		t.Run(c.name, func(t *testing.T) {
			site := &site{leader: &leader{addr: "127.0.0.1:1"}}
			whole, err := berthConfig(sockets{"/r", "/a"}, nil)
			require.NoError(t, err)
			changed, err := site.config(c, sockets{"/r", "/a"})
			require.NoError(t, err)
			if c.change != nil {
				require.NoError(t, c.change(changed))
			}
			before, err := json.Marshal(whole)
			require.NoError(t, err)
			after, err := json.Marshal(changed)
			require.NoError(t, err)
			other := c.env != nil || c.args != nil || c.concurrency != 0 || c.kind == kindStock
			require.Equal(t, other, string(before) == string(after))
		})
	}
}

func TestRatiosAreToTheReferenceOfTheRound(t *testing.T) {
	r := report{reference: nameReference, control: nameControl}
	all := []*scenario{{name: nameReference}, {name: nameControl}}
	r.add(cell{Work: workGet}, all, [][]sample{{{CPU: 100}, {CPU: 200}, {CPU: 50}}, {{CPU: 110}, {CPU: 200}, {CPU: 60}}})
	require.Equal(t, spread{Median: 1.1, Least: 1, Most: 1.2}, r.Cells[0].Rows[1].Ratio["cpu"])
	require.InDelta(t, 0.1, r.noise(r.Cells[0]), 1e-9)
}

func TestAnswersOfEveryServerAreRead(t *testing.T) {
	status, length, err := head([]byte("HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 12\r\n"))
	require.NoError(t, err)
	require.Equal(t, []int{200, 12}, []int{status, length})
	status, length, err = head([]byte("HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n"))
	require.NoError(t, err)
	require.Equal(t, []int{101, 0}, []int{status, length})
	_, _, err = head([]byte("HTTP"))
	require.Error(t, err)
}
