package main

import (
	"fmt"
	"html"
	"slices"
	"strings"
)

// bar is a line of a chart: stacked values.
type bar struct {
	label  string
	values []float64
}

// colours of stacked values, and the sizes of a chart in pixels.
var colours = []string{"#4878a8", "#e0a030"}

const (
	chartWidth, labelWidth, valueWidth = 760, 190, 60
	barHeight, barPitch, headHeight    = 14, 20, 48
)

// chart draws horizontal bars, with a gap where the label is empty. legend names the stacked values.
func chart(title string, legend []string, bars []bar) string {
	most := 0.0
	for _, b := range bars {
		most = max(most, sum(b.values))
	}
	var s strings.Builder
	height := headHeight + barPitch*len(bars)
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" `+
		`font-family="sans-serif" font-size="12">`, chartWidth, height)
	s.WriteString("\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n")
	fmt.Fprintf(&s, `<text x="8" y="18" font-size="14">%s</text>`+"\n", html.EscapeString(title))
	for i, name := range legend {
		x := labelWidth + 150*i
		fmt.Fprintf(&s, `<rect x="%d" y="28" width="10" height="10" fill="%s"/><text x="%d" y="38">%s</text>`+"\n",
			x, colours[i], x+14, html.EscapeString(name))
	}
	scale := float64(chartWidth-labelWidth-valueWidth) / max(most, 1e-9)
	for i, b := range bars {
		if b.label == "" {
			continue
		}
		y, x := headHeight+barPitch*i, float64(labelWidth)
		fmt.Fprintf(&s, `<text x="%d" y="%d" text-anchor="end">%s</text>`, labelWidth-6, y+12, html.EscapeString(b.label))
		for n, v := range b.values {
			fmt.Fprintf(&s, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`, x, y, v*scale, barHeight, colours[n])
			x += v * scale
		}
		fmt.Fprintf(&s, `<text x="%.1f" y="%d">%.0f</text>`+"\n", x+4, y+12, sum(b.values))
	}
	s.WriteString("</svg>\n")
	return s.String()
}

func sum(values []float64) (total float64) {
	for _, v := range values {
		total += v
	}
	return total
}

// charts returns the charts of a comparison, by file name.
func (r *report) charts() map[string]string {
	var cpu, latency, sandboxes []bar
	for _, c := range r.Cells {
		if c.Work != workGet || c.Rate > 0 {
			continue
		}
		for _, w := range c.Rows {
			if w.Median.CPU > 0 && c.Connections == 64 && slices.Contains([]string{nameReference, nameBerth}, w.Scenario) {
				label := fmt.Sprintf("%s, %d sandboxes", w.Scenario, c.Sandboxes)
				sandboxes = append(sandboxes, bar{label, []float64{w.Median.EnvoyCPU, w.Median.RouterCPU}})
			}
			if c.Sandboxes == 1000 {
				label := fmt.Sprintf("%s, %d conn.", w.Scenario, c.Connections)
				cpu = append(cpu, bar{label, []float64{w.Median.EnvoyCPU, w.Median.RouterCPU}})
				latency = append(latency, bar{label, []float64{w.Median.P50, w.Median.P99 - w.Median.P50}})
			}
		}
		if c.Sandboxes == 1000 {
			cpu, latency = append(cpu, bar{}), append(latency, bar{})
		}
	}
	return map[string]string{
		"cpu.svg":       chart("CPU per request, microseconds: GET, 1,000 sandboxes", []string{"Envoy", "router"}, cpu),
		"latency.svg":   chart("Latency, microseconds: GET, 1,000 sandboxes", []string{"p50", "to p99"}, latency),
		"sandboxes.svg": chart("CPU per request, microseconds: GET, 64 connections", []string{"Envoy", "router"}, sandboxes),
	}
}
