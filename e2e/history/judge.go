package history

import "fmt"

// Violation is something that must not happen.
type Violation struct {
	// What names the kind of violation in a word or two.
	What string
	// Text names the sandboxes, pods, requests and moments.
	Text string
}

func (v Violation) String() string { return v.What + ": " + v.Text }

// Judge looks for one kind of violation.
type Judge struct {
	Name string
	Find func(*History) []Violation
}

// Suite names a test and its judges.
type Suite string

// The suites.
const (
	Soak    Suite = "soak"
	Reaping Suite = "reaping"
	Chaos   Suite = "chaos"
	Routing Suite = "routing"
)

// Judges returns the judges of a suite, in the order in which they report. It fails for a
// suite that has none.
func Judges(s Suite) ([]Judge, error) {
	switch s {
	case Soak:
		return []Judge{
			{"wrong-pod", WrongPod}, {"twice", Twice}, {"unmatched", Unmatched}, {"came-back", CameBack},
			{"early-reuse", EarlyReuse}, {"double", Double}, {"lost", Lost},
		}, nil
	case Reaping:
		return []Judge{
			{"false-reap", FalseReap}, {"after-reap", AfterReap}, {"never-reaped", NeverReaped}, {"other-reason", OtherReason},
			{"wrong-pod", WrongPod}, {"lost", Lost}, {"not-served", NotServed}, {"clock", Clocks},
		}, nil
	case Chaos:
		return []Judge{
			{"double", Double}, {"owner", Owners}, {"lost", Lost}, {"alive", Alive}, {"revived", Revived},
			{"leaked", Leaked}, {"order", Order}, {"refused", Refused},
		}, nil
	case Routing:
		return []Judge{{"wrong-pod", WrongPod}, {"came-back", CameBack}, {"unserved", Unserved}}, nil
	}
	return nil, fmt.Errorf("history: suite %q has no judges", s)
}

// Violations returns what the judges of the history's suite find. It fails for a suite
// that has no judges.
func (h *History) Violations() ([]Violation, error) {
	judges, err := Judges(h.Settings.Suite)
	if err != nil {
		return nil, err
	}
	var all []Violation
	for _, j := range judges {
		all = append(all, j.Find(h)...)
	}
	return all, nil
}

// found collects violations.
type found []Violation

func (f *found) add(what, format string, args ...any) {
	*f = append(*f, Violation{what, fmt.Sprintf(format, args...)})
}
