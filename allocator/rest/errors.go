package rest

import (
	"fmt"
	"net/http"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
)

func invalid(format string, args ...any) *apierror.Error {
	return apierror.New(apierror.BadRequest, format, args...)
}

func notImplemented(format string, args ...any) *apierror.Error {
	return apierror.New(apierror.NotImplemented, format, args...)
}

// unknownOutcome is the error of a call that may have taken effect.
func unknownOutcome(reason apierror.Reason, format string, args ...any) *apierror.Error {
	e := apierror.New(reason, format, args...)
	e.OutcomeUnknown = true
	return e
}

func missing(id string, reason apierror.Reason, message string) *apierror.Error {
	e := apierror.New(reason, "%s", message)
	e.SandboxID = id
	e.Code = http.StatusNotFound // for a gone sandbox too: the E2B SDKs do not know 410
	return e
}

// notFound returns the error for a sandbox that is not live.
func notFound(id string, s core.Sandbox, known bool) error {
	if !known {
		return missing(id, apierror.SandboxNotFound, "there is no such sandbox")
	}
	return missing(id, apierror.SandboxGone, fmt.Sprintf("this sandbox was released at %s: %s", s.ReleasedAt.UTC().Format(time.RFC3339), s.Reason))
}

// about returns an error that names a sandbox.
func about(id string, reason apierror.Reason, message string) *apierror.Error {
	e := apierror.New(reason, "%s", message)
	e.SandboxID = id
	return e
}

// notLive returns the error for a sandbox that is unknown or gone, or does not take the call; nil: it has taken it.
func notLive(id string, status core.CallStatus) error {
	switch status {
	case core.CallUnknown:
		return missing(id, apierror.SandboxNotFound, "there is no such sandbox")
	case core.CallGone:
		return missing(id, apierror.SandboxGone, "this sandbox was released earlier")
	case core.CallAsleep:
		return about(id, apierror.SandboxState, "this sandbox is asleep or stopped, or about to be; wake it with POST /sandboxes/{id}/connect")
	case core.CallNotReady:
		return about(id, apierror.SandboxBusy, "this sandbox is being archived, or cannot fall asleep now; try again")
	case core.CallRefused:
		return about(id, apierror.SleepFailed, "this sandbox did not fall asleep, and runs")
	case core.CallUnfit:
		return about(id, apierror.NotImplemented, "this sandbox cannot sleep")
	case core.CallOK:
	}
	return nil
}
