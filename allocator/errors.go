package allocator

import "errors"

var (
	// ErrLeaseLost is returned by Run when another replica may lead now. The process must
	// end.
	ErrLeaseLost = errors.New("allocator: the lease was lost; this process ends so that nothing of its term remains")
	// ErrLeads is returned by JournalBeginning.Begin when an allocator holds the lease: it can
	// read the journal, or repairs it.
	ErrLeads = errors.New("allocator: an allocator holds the lease; stop the allocators first, for example by scaling their Deployment to 0")

	// errStepDown is returned when this replica stops leading during a call.
	errStepDown = errors.New("allocator: this replica no longer leads")
	// errResigned is returned after Close.
	errResigned = errors.New("this replica is shutting down")
	// errEndTimeout is joined to the error of Run when a part of the term did not end in time
	// and may still run.
	errEndTimeout = errors.New("allocator: a part of the ended term still runs; this process must end")
	// errViolated ends a term whose leader was about to violate an assertion: see package guard.
	errViolated = errors.New("allocator: the term has ended because of a violated assertion, which the log names")
	// errRestored ends a term whose leader has begun the journal anew.
	errRestored = errors.New("allocator: the journal was restored from a backup and has been begun anew; the next leader serves it, and hands out no pod until no router of the earlier journal can send requests to its address, see docs/backup.md")
)
