package envoy

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/apierror"
)

// The documented reasons of Envoy must equal the configured ones.
func TestEnvoyReasonsAreDocumented(t *testing.T) {
	var documented, configured []apierror.Reason
	for _, k := range apierror.Kinds() {
		if slices.Contains(k.By, apierror.Envoy) {
			documented = append(documented, k.Reason)
			require.Equal(t, translated(k.Code), k.GRPC, k.Reason)
		}
	}
	for _, f := range slices.Concat(apiFailures(), egressFailures(), failures(), unaccepted()) {
		configured = append(configured, f.reason)
		require.NotContains(t, strings.ReplaceAll(f.message, "%RESPONSE_CODE_DETAILS%", ""), "%", "a percent sign begins a command of Envoy")
		require.NotContains(t, strings.ReplaceAll(f.page(), "%RESPONSE_CODE_DETAILS%", ""), "%")
	}
	require.ElementsMatch(t, documented, configured)
}

// translated is the gRPC status that Envoy makes of an HTTP status
// (source/common/grpc/status.cc).
func translated(code int) codes.Code {
	switch code {
	case 400:
		return codes.Internal
	case 401:
		return codes.Unauthenticated
	case 403:
		return codes.PermissionDenied
	case 404:
		return codes.Unimplemented
	case 429, 502, 503, 504:
		return codes.Unavailable
	}
	return codes.Unknown
}
