package core

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"time"
)

// traced is formatted only when it is printed.
type traced struct{ v any }

func (t traced) String() string { return trace(t.v) }

// trace shows an event or an effect: its type and what is set in it. IDs of pods and
// pools are their names.
func trace(v any) string {
	value := reflect.ValueOf(v)
	var b strings.Builder
	b.WriteString(value.Type().Name())
	for i := range value.NumField() {
		f := value.Field(i)
		if f.IsZero() {
			continue
		}
		name := value.Type().Field(i).Name
		switch is := f.Interface().(type) {
		case bool:
			fmt.Fprintf(&b, " %s", name)
		case Pod, Pool:
			fmt.Fprintf(&b, " %s", trace(is))
		case Sandbox:
			fmt.Fprintf(&b, " %s", traceSandbox(is))
		case *Sandbox:
			fmt.Fprintf(&b, " %s", traceSandbox(*is))
		default:
			fmt.Fprintf(&b, " %s=%s", name, traceValue(is))
		}
	}
	return b.String()
}

func traceValue(v any) string {
	switch v := v.(type) {
	case PodKey:
		return v.Name
	case PoolKey:
		return v.Name
	case Revision:
		return fmt.Sprintf("%d.%d", v.Term, v.Counter)
	case netip.Addr:
		return v.String()
	case time.Time:
		return v.Format(time.TimeOnly)
	case Binding:
		return trace(v)
	case []Fact:
		all := make([]string, 0, len(v))
		for _, f := range v {
			all = append(all, trace(f))
		}
		return "[" + strings.Join(all, ", ") + "]"
	case []Sandbox:
		all := make([]string, 0, len(v))
		for _, s := range v {
			all = append(all, traceSandbox(s))
		}
		return "[" + strings.Join(all, ", ") + "]"
	case [32]byte:
		return fmt.Sprint(v[0])
	}
	return fmt.Sprint(v)
}

var phaseNames = map[Phase]string{Starting: "starting", Running: "running", FallingAsleep: "falling asleep", Asleep: "asleep", Waking: "waking", Releasing: "releasing", Released: "released", Ended: "ended"}

func traceSandbox(s Sandbox) string {
	text := fmt.Sprintf("(%s on %s at %v: %s", s.ID, s.Pod.Name, s.IP, phaseNames[s.Phase])
	if s.Reason != "" {
		text += " for " + s.Reason
	}
	return text + ")"
}
