package extproc

import "github.com/berth-sandbox/berth/extproc/admission"

// Admissions are the unread answers of a router in the model of package allocator/core, which lets messages arrive
// between the steps of an admission.
type Admissions struct{ *admission.Answers }

// Epoch is what Admit returns and Done takes.
type Epoch = admission.Epoch

// NewAdmissions returns Admissions without an unread answer.
func NewAdmissions() *Admissions { return &Admissions{admission.NewAnswers()} }

// Admit counts an answer that is about to be sent, provided that holds returns true.
func (a *Admissions) Admit(holds func() bool) (e *Epoch, ok bool) {
	e = a.Begin()
	if !holds() {
		a.Done(e)
		return nil, false
	}
	return e, true
}
