// Package chart draws line charts as inline SVG on the server, with a table of the same values. It needs no script, and
// colours and sizes come from classes of the style sheet only.
//
// # Guarantees
//
//   - The size of a drawing is bounded: Columns points for each line, and Rows rows of the table.
//   - What is not known is a gap in the line and an empty cell of the table, never a 0.
package chart

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"strconv"
	"strings"
	"time"
)

const (
	// Columns is the number of points of a line.
	Columns = 120
	// Rows is the number of rows of the table, and perRow how many points of a line each stands for.
	Rows   = 12
	perRow = Columns / Rows
	height = 40
)

// Line is one line of a chart.
type Line struct {
	Name string
	// Values has one value for each of Columns parts of the time, NaN for what is not known.
	Values [Columns]float64
}

// Chart is a chart of some lines over the time from From to To.
type Chart struct {
	// ID is that of its element, and must be unique in its page.
	ID, Title string
	// Unit says how values are shown.
	Unit     Unit
	From, To time.Time
	Lines    []Line
	// Known says in which columns something was measured. The others are shown as gaps.
	Known [Columns]bool
	// Peak: a row of the table shows the highest value of its time and not the mean.
	Peak bool
}

// Unit is how a value is shown.
type Unit int

// The units: a number, a number per second or per minute, seconds, a share from 0 to 1, and bytes.
const (
	Count Unit = iota
	PerSecond
	PerMinute
	Seconds
	Share
	Bytes
)

// Format shows a value, or "" for one that is not known.
func (u Unit) Format(v float64) string {
	switch {
	case math.IsNaN(v):
		return ""
	case u == PerSecond:
		return number(v) + "/s"
	case u == PerMinute:
		return number(v) + "/min"
	case u == Share:
		return number(100*v) + " %"
	case u == Seconds && v < 1:
		return number(1000*v) + " ms"
	case u == Seconds:
		return number(v) + " s"
	case u == Bytes:
		return size(v)
	}
	return number(v)
}

// size shows a number of bytes in the largest unit that is not above it.
func size(v float64) string {
	unit := 0
	units := []string{" B", " KiB", " MiB", " GiB", " TiB"}
	for ; v >= 1<<10 && unit < len(units)-1; unit++ {
		v /= 1 << 10
	}
	return number(v) + units[unit]
}

// number shows three digits of a number, or all before the point.
func number(v float64) string {
	if math.Abs(v) >= 100 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// top returns the upper end of the scale: the next of 1, 2 and 5 times a power of ten that no value exceeds, or the
// next power of two for bytes.
func (c *Chart) top() float64 {
	highest := 0.0
	for i := range c.Lines {
		for _, v := range c.Lines[i].Values {
			if v > highest {
				highest = v
			}
		}
	}
	switch {
	case c.Unit == Share:
		return 1
	case highest == 0 && c.Unit == Seconds:
		return .01
	case highest == 0:
		return 1
	case c.Unit == Bytes:
		return math.Exp2(math.Ceil(math.Log2(highest)))
	}
	power := math.Pow(10, math.Floor(math.Log10(highest)))
	for _, m := range []float64{1, 2, 5} {
		if highest <= m*power*(1+1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// path returns the path of a line in SVG. A point between two gaps is a short stroke.
func path(l *Line, top float64) string {
	var b strings.Builder
	drawing := false
	for i, v := range l.Values {
		if math.IsNaN(v) {
			drawing = false
			continue
		}
		command, x := 'L', float64(i)+.5
		if !drawing {
			command = 'M'
		}
		y := strconv.FormatFloat(math.Round(10*height*(1-min(max(v/top, 0), 1)))/10, 'f', -1, 64)
		fmt.Fprintf(&b, "%c%g %s", command, x, y)
		if lone := i == Columns-1 || math.IsNaN(l.Values[i+1]); lone && !drawing {
			fmt.Fprintf(&b, "h.5")
		}
		drawing = true
	}
	return b.String()
}

// latest returns the latest value that is known.
func (l *Line) latest() float64 {
	for i := Columns - 1; i >= 0; i-- {
		if v := l.Values[i]; !math.IsNaN(v) {
			return v
		}
	}
	return math.NaN()
}

// gaps returns the columns in which nothing was measured, as the first one and their number.
func (c *Chart) gaps() (all [][2]int) {
	for i, known := range c.Known[:Columns-1] { // the last column has not ended yet
		switch n := len(all) - 1; {
		case known:
		case n >= 0 && all[n][0]+all[n][1] == i:
			all[n][1]++
		default:
			all = append(all, [2]int{i, 1})
		}
	}
	return all
}

// in returns the value of a row of the table: the mean or the highest of those that are known.
func (c *Chart) in(l *Line, row int) float64 {
	sum, n, highest := 0.0, 0, math.NaN()
	for _, v := range l.Values[row*perRow : (row+1)*perRow] {
		if !math.IsNaN(v) {
			sum += v
			n++
			highest = max(v, cmpNaN(highest, v))
		}
	}
	if c.Peak || n == 0 {
		return highest
	}
	return sum / float64(n)
}

// cmpNaN returns a, or b if a is not a number.
func cmpNaN(a, b float64) float64 {
	if math.IsNaN(a) {
		return b
	}
	return a
}

// describe says in words what a drawing shows.
func (c *Chart) describe() string {
	var parts []string
	for i := range c.Lines {
		l := &c.Lines[i]
		highest := math.NaN()
		for _, v := range l.Values {
			if !math.IsNaN(v) {
				highest = max(v, cmpNaN(highest, v))
			}
		}
		if math.IsNaN(highest) {
			parts = append(parts, l.Name+": no value")
			continue
		}
		parts = append(parts, fmt.Sprintf("%s: latest %s, highest %s",
			l.Name, c.Unit.Format(l.latest()), c.Unit.Format(highest)))
	}
	return strings.Join(parts, "; ")
}

type shownLine struct{ Class, Name, Path, Latest string }

type shownRow struct {
	Time  time.Time
	Cells []string
}

// drawing is what the template shows.
type drawing struct {
	*Chart
	Describe string
	Top      string
	Shown    []shownLine
	Gaps     [][2]int
	Ticks    []time.Time
	Table    []shownRow
}

// Draw writes the chart as an element figure.
func (c *Chart) Draw(w io.Writer) error {
	top := c.top()
	d := drawing{Chart: c, Describe: c.describe(), Top: c.Unit.Format(top), Gaps: c.gaps()}
	for i := range c.Lines {
		l := &c.Lines[i]
		d.Shown = append(d.Shown, shownLine{
			Class: fmt.Sprintf("line-%d", i+1), Name: l.Name, Path: path(l, top), Latest: c.Unit.Format(l.latest()),
		})
	}
	const quarters = 4
	for i := range quarters + 1 {
		d.Ticks = append(d.Ticks, c.From.Add(time.Duration(i)*c.To.Sub(c.From)/quarters))
	}
	for row := Rows - 1; row >= 0; row-- {
		r := shownRow{Time: c.From.Add(time.Duration(row) * c.To.Sub(c.From) / Rows)}
		for i := range c.Lines {
			r.Cells = append(r.Cells, c.Unit.Format(c.in(&c.Lines[i], row)))
		}
		d.Table = append(d.Table, r)
	}
	return figure.Execute(w, d)
}

var figure = template.Must(template.New("chart").Funcs(template.FuncMap{
	"clock": func(t time.Time) string { return t.UTC().Format("15:04") },
	"stamp": func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
}).Parse(`<figure class="chart" id="{{.ID}}">
<figcaption>{{.Title}}</figcaption>
<ul class="chart-legend">{{range .Shown}}<li class="{{.Class}}">{{.Name}} <b>{{or .Latest "–"}}</b></li>{{end}}</ul>
<div class="chart-plot"><span class="chart-top">{{.Top}}</span>
<svg viewBox="0 0 120 40" preserveAspectRatio="none" role="img" aria-labelledby="{{.ID}}-title {{.ID}}-desc">
<title id="{{.ID}}-title">{{.Title}}</title><desc id="{{.ID}}-desc">{{.Describe}}</desc>
{{range .Gaps}}<rect class="chart-gap" x="{{index . 0}}" y="0" width="{{index . 1}}" height="40"/>{{end}}
<path class="chart-grid" d="M0 0H120M0 20H120M0 40H120" fill="none" vector-effect="non-scaling-stroke"/>
{{range .Shown}}{{if .Path}}<path class="{{.Class}}" d="{{.Path}}" fill="none" vector-effect="non-scaling-stroke"/>
{{end}}{{end}}</svg></div>
<div class="chart-times" aria-hidden="true">{{range .Ticks}}<span>{{clock .}}</span>{{end}}</div>
<details id="{{.ID}}-table"><summary>Values</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Values: {{.Title}}"><table>
<caption>{{.Title}}: {{if .Peak}}the highest{{else}}the mean{{end}} in each 5 minutes, UTC</caption>
<thead><tr><th scope="col">From</th>{{range .Shown}}<th scope="col">{{.Name}}</th>{{end}}</tr></thead>
<tbody>{{range .Table}}<tr><th scope="row"><time datetime="{{stamp .Time}}">{{clock .Time}}</time></th>
{{- range .Cells}}<td>{{.}}</td>{{end}}</tr>
{{end}}</tbody></table></div></details>
</figure>
`))
