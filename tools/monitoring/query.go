package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/berth-sandbox/berth/api/metric"
)

// namespace is the label by which installations are told apart. The scraper sets it, and pod.
const (
	namespace = "namespace"
	pod       = "pod"
)

// series returns the series of a name that match.
func series(name string, matchers ...string) string {
	if len(matchers) == 0 {
		return name
	}
	return name + "{" + strings.Join(matchers, ",") + "}"
}

func is(label, value string) string { return label + "=" + strconv.Quote(value) }

func isOne(label string, values ...string) string {
	return label + "=~" + strconv.Quote(strings.Join(values, "|"))
}

// upTo matches the bucket of a bound. Prometheus 3 writes 5 as "5.0", and earlier ones as "5".
func upTo(bound float64) string {
	text := strconv.FormatFloat(bound, 'f', -1, 64)
	if strings.Contains(text, ".") {
		return is("le", text)
	}
	return isOne("le", text, text+`\.0`)
}

func rate(of, window string) string { return fmt.Sprintf("rate(%s[%s])", of, window) }

func sum(by, expr string) string { return fmt.Sprintf("sum by (%s) (%s)", by, expr) }

func most(by, expr string) string { return fmt.Sprintf("max by (%s) (%s)", by, expr) }

// quantile returns a quantile of a histogram.
func quantile(q float64, h metric.Histogram, by, window string, matchers ...string) string {
	if by != "" {
		by = ", " + by
	}
	return fmt.Sprintf("histogram_quantile(%v, %s)", q, sum("le"+by, rate(series(h.BucketName(), matchers...), window)))
}
