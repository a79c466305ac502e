package history

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Series are the values of one metric, by the values of its labels.
type Series map[string]*dto.Metric

// Read returns what a collector would expose now.
func Read(c prometheus.Collector) Series {
	found := make(chan prometheus.Metric)
	go func() {
		defer close(found)
		c.Collect(found)
	}()
	all := Series{}
	for m := range found {
		var value dto.Metric
		if m.Write(&value) != nil {
			continue // a collector that is broken fails its scrapes too
		}
		key := ""
		for _, label := range value.GetLabel() {
			key += label.GetValue() + "\xff"
		}
		all[key] = &value
	}
	return all
}

// Increases calls f with a label and the increase of each counter since before.
func (s Series) Increases(before Series, label string, f func(value string, by uint32)) {
	for key, now := range s {
		by := now.GetCounter().GetValue()
		if was := before[key].GetCounter().GetValue(); was <= by {
			by -= was
		}
		value := ""
		for _, l := range now.GetLabel() {
			if l.GetName() == label {
				value = l.GetValue()
			}
		}
		if by > 0 {
			f(value, uint32(by))
		}
	}
}

// Quantile returns the quantile q of what a histogram without labels has observed since before, or NaN if that is
// nothing. Like Prometheus it takes the values in a bucket as evenly distributed.
func (s Series) Quantile(before Series, q float64) float64 {
	now, was := s[""].GetHistogram(), before[""].GetHistogram()
	total := now.GetSampleCount() - was.GetSampleCount()
	if total == 0 {
		return math.NaN()
	}
	rank, lower, below := q*float64(total), 0.0, 0.0
	for i, bucket := range now.GetBucket() {
		count := float64(bucket.GetCumulativeCount())
		if old := was.GetBucket(); i < len(old) {
			count -= float64(old[i].GetCumulativeCount())
		}
		upper := bucket.GetUpperBound()
		if count >= rank && count > below {
			return lower + (upper-lower)*(rank-below)/(count-below)
		}
		lower, below = upper, count
	}
	return lower // above all buckets
}
