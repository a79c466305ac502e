package controlserver

import (
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
)

// Bounds of a router's texts, in bytes.
const (
	maxGateway   = 128
	maxLookError = 256
)

// kindWord matches a kind of use. A later version may have further kinds.
var kindWord = regexp.MustCompile(`^[a-z]{1,32}$`)

// activities decodes the activities of a message.
func activities(field string, all []*controlv1.Activity) ([]core.Activity, error) {
	if len(all) > maxActivities {
		return nil, status.Errorf(codes.InvalidArgument, "%s.activities: %d exceed the limit of %d", field, len(all), maxActivities)
	}
	list := make([]core.Activity, 0, len(all))
	for _, a := range all {
		if a.GetSandboxId() == "" {
			return nil, status.Errorf(codes.InvalidArgument, "%s.activities: sandbox_id is missing", field)
		}
		kind := activity.Kind(a.GetKind())
		if !kindWord.MatchString(a.GetKind()) {
			kind = activity.Unknown
		}
		list = append(list, core.Activity{ID: a.GetSandboxId(), Age: ago(a.GetAgeMillis()), Open: int(a.GetOpenRequests()), Kind: kind})
	}
	return list, nil
}

// report decodes a Report, and quiesced a Quiesced.
func report(stream uint64, r *controlv1.Report) (core.Report, error) {
	all, err := activities("report", r.GetActivities())
	if err == nil && len(r.GetGateway()) > maxGateway {
		err = status.Errorf(codes.InvalidArgument, "report.gateway: %d bytes exceed the limit of %d", len(r.GetGateway()), maxGateway)
	}
	return core.Report{
		Stream: stream, Activities: all, Gateway: r.GetGateway(), Nonce: r.GetNonce(), Took: ago(r.GetTookMillis()), Blind: first(r.GetLookError(), maxLookError),
	}, err
}

func quiesced(stream uint64, q *controlv1.Quiesced) (core.Quiesced, error) {
	all, err := activities("quiesced", q.GetActivities())
	return core.Quiesced{Stream: stream, Number: q.GetNumber(), Activities: all, Blind: first(q.GetLookError(), maxLookError)}, err
}

// first returns the first limit bytes of a text.
func first(text string, limit int) string {
	return strings.ToValidUTF8(text[:min(len(text), limit)], "")
}

// ago returns a duration in milliseconds, limited to a hundred years.
func ago(millis uint64) time.Duration {
	const limit = 100 * 365 * 24 * time.Hour
	return time.Duration(min(millis, uint64(limit/time.Millisecond))) * time.Millisecond
}

// checkDead checks a report of deaths.
func checkDead(dead *controlv1.Dead, by string) error {
	if err := checkSecret("dead.gateway_secret", dead.GetGatewaySecret()); err != nil {
		return err
	}
	ids := dead.GetRouterIds()
	if len(ids) > maxDead {
		return status.Errorf(codes.InvalidArgument, "dead.router_ids: %d exceed the limit of %d", len(ids), maxDead)
	}
	for _, id := range ids {
		if err := checkID("dead.router_ids", id); err != nil {
			return err
		}
		if id == by {
			return status.Errorf(codes.InvalidArgument, "dead.router_ids: %s reports itself as dead", by)
		}
	}
	return nil
}
