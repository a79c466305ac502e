package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

func drawn(t *testing.T, c *Chart) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, c.Draw(&b))
	return b.String()
}

// full returns a line with one value everywhere.
func full(name string, v float64) (l Line) {
	l.Name = name
	for i := range l.Values {
		l.Values[i] = v
	}
	return l
}

func TestNoValueIsDrawnAsAGap(t *testing.T) {
	l := full("granted", 10)
	for _, i := range []int{0, 1, 2, 10, 12} {
		l.Values[i] = math.NaN()
	}
	c := &Chart{ID: "c", Title: "Claims", Unit: PerSecond, From: noon.Add(-time.Hour), To: noon, Lines: []Line{l}}
	for i := range c.Known {
		c.Known[i] = i > 2
	}
	text := drawn(t, c)
	require.Contains(t, text, `d="M3.5 0L4.5 0L5.5 0L6.5 0L7.5 0L8.5 0L9.5 0M11.5 0h.5M13.5 0L`)
	require.Equal(t, 1, strings.Count(text, `class="chart-gap"`), "a time without claims is no gap in the measurements")
	require.Contains(t, text, `<rect class="chart-gap" x="0" y="0" width="3" height="40"/>`)
	require.Contains(t, text, "granted: latest 10/s, highest 10/s")

	c.Lines[0] = full("granted", math.NaN())
	text = drawn(t, c)
	require.Contains(t, text, "granted: no value")
	require.NotContains(t, text, "NaN")
	require.NotContains(t, text, `class="line-1" d`)
}

func TestTableHasTheValuesOfTheDrawing(t *testing.T) {
	l := full("half", .001)
	l.Values[Columns-1] = 2
	c := &Chart{ID: "c", Title: "Time", Unit: Seconds, From: noon.Add(-time.Hour), To: noon, Peak: true,
		Lines: []Line{l, full("all", math.NaN())}}
	text := drawn(t, c)
	require.Regexp(t, `datetime="2030-01-01T11:55:00Z">11:55</time></th><td>2 s</td><td></td></tr>`, text)
	require.Regexp(t, `datetime="2030-01-01T11:00:00Z">11:00</time></th><td>1 ms</td><td></td></tr>`, text)
	require.Equal(t, Rows, strings.Count(text, `<th scope="row">`))
	c.Peak = false
	require.Contains(t, drawn(t, c), `11:55</time></th><td>201 ms</td>`)
}

func TestScaleHoldsEveryValue(t *testing.T) {
	for highest, top := range map[float64]string{
		0: "1", .7: "1", 1: "1", 1.1: "2", 3: "5", 5: "5", 7: "10", 4321: "5000",
	} {
		c := &Chart{ID: "c", Lines: []Line{full("x", highest)}}
		require.Contains(t, drawn(t, c), `<span class="chart-top">`+top+`</span>`, highest)
	}
	share := &Chart{ID: "c", Unit: Share, Lines: []Line{full("x", .2)}}
	require.Contains(t, drawn(t, share), `<span class="chart-top">100 %</span>`)
}

func TestUsageFallsIntoTheHourBeforeTheLatestMeasurement(t *testing.T) {
	at := func(ago time.Duration, pct float64, memory int64) openapi.SandboxMetric {
		return openapi.SandboxMetric{Timestamp: noon.Add(-ago), CPUUsedPct: pct, CPUCount: 2, MemUsed: memory}
	}
	require.Empty(t, OfUsage(nil))
	require.Empty(t, OfUsage([]openapi.SandboxMetric{at(0, 1, 1)}), "one measurement is no history")
	charts := OfUsage([]openapi.SandboxMetric{
		at(2*time.Hour, 100, 1<<40), at(60*time.Second, 10, 300<<20), at(45*time.Second, 30, 100<<20), at(0, 100, 5<<20),
	})
	require.Len(t, charts, 2)
	cpu, memory := charts[0], charts[1]
	require.InDelta(t, .4, cpu.Lines[0].Values[Columns-3], 1e-9, "the mean of its time, in CPUs")
	require.True(t, math.IsNaN(cpu.Lines[0].Values[Columns-2]), "nothing was measured")
	require.InDelta(t, 2, cpu.Lines[0].Values[Columns-1], 1e-9)
	require.Equal(t, [][2]int{{0, Columns - 3}, {Columns - 2, 1}}, cpu.gaps())
	text := drawn(t, &memory)
	require.Contains(t, text, "memory: latest 5 MiB, highest 300 MiB")
	require.Contains(t, text, `<span class="chart-top">512 MiB</span>`)
	require.NotContains(t, text+drawn(t, &cpu), "NaN")
}

func TestBytesAreShownInTheLargestUnitBelow(t *testing.T) {
	for v, text := range map[float64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536 << 10: "1.5 MiB", 1 << 30: "1 GiB", 1 << 60: "1048576 TiB",
	} {
		require.Equal(t, text, Bytes.Format(v))
	}
}

// The policy of the pages allows no style and no script in a page, and a name may be hostile.
func TestDrawingHasNoStyleScriptOrForeignMarkup(t *testing.T) {
	c := &Chart{ID: "c", Title: `<script>alert(1)</script>`, Lines: []Line{full(`"><img src=x onerror=alert(1)>`, 1)}}
	text := drawn(t, c)
	require.NotRegexp(t, regexp.MustCompile(`<script|<img|\sstyle=|\son[a-z]+="`), text)
	decoder := xml.NewDecoder(strings.NewReader(text))
	decoder.Strict = false
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
	}
}

func TestHistoryFallsIntoTheColumnsOfItsTime(t *testing.T) {
	n := func(counts ...int) (all []*int) {
		for _, c := range counts {
			if c < 0 {
				all = append(all, nil)
			} else {
				all = append(all, &c)
			}
		}
		return all
	}
	slow := .25
	h := &openapi.History{
		Since: noon.Add(-time.Minute), Until: noon, StepSeconds: 10,
		ClaimsClaimed: n(10, 20, 30, -1, -1, 60), Live: n(1, 2, 3, -1, -1, 6),
		PoolWarm: n(3, 0, 0, 0, 0, 0), PoolWaited: n(1, 0, 0, 0, 0, 0), PoolRefused: n(0, 0, 0, 0, 0, 0),
		ClaimP50Seconds: []*float64{nil, &slow, nil, nil, nil, nil}, PodFailures: n(0, 1, 0, 0, 0, 0),
	}
	charts := map[string]Chart{}
	for _, c := range Of(h, noon) {
		charts[c.ID] = c
		require.Equal(t, time.Hour, c.To.Sub(c.From))
		require.Equal(t, []int{0, Columns - 3}, c.gaps()[0][:], "the time before the leader")
	}
	value := func(id string, line, back int) float64 { return charts[id].Lines[line].Values[Columns-1-back] }
	// The last column is the one that began at noon: nothing in it was measured.
	require.True(t, math.IsNaN(value("chart-claims", 0, 0)))
	require.InDelta(t, 6, value("chart-claims", 0, 1), 1e-9, "steps without a measurement count for nothing")
	require.InDelta(t, 2, value("chart-claims", 0, 2), 1e-9)
	require.InDelta(t, 6, value("chart-live", 0, 1), 1e-9)
	require.InDelta(t, 3, value("chart-live", 0, 2), 1e-9)
	require.InDelta(t, .25, value("chart-claim-time", 0, 2), 1e-9)
	require.InDelta(t, .75, value("chart-warm", 0, 2), 1e-9)
	require.True(t, math.IsNaN(value("chart-warm", 0, 1)), "no share of no claims")
	require.InDelta(t, 2, value("chart-errors", 1, 2), 1e-9)
	for id := range charts {
		c := charts[id]
		require.NotContains(t, drawn(t, &c), "NaN")
	}

	later := Of(h, noon.Add(2*time.Hour)) // no answer for long
	require.Equal(t, [][2]int{{0, Columns - 1}}, later[0].gaps())
}
