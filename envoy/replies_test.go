package envoy

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
)

// What the documentation says Envoy sends is what it is configured to send.
func TestEnvoyAnswersWithTheReasonsThatAreDocumented(t *testing.T) {
	var documented, configured []apierror.Reason
	for _, k := range apierror.Kinds() {
		if slices.Contains(k.By, apierror.Envoy) {
			documented = append(documented, k.Reason)
		}
	}
	for _, f := range failures() {
		configured = append(configured, f.reason)
		require.NotContains(t, strings.ReplaceAll(f.message, "%RESPONSE_CODE_DETAILS%", ""), "%", "a percent sign begins a command of Envoy")
		require.NotContains(t, strings.ReplaceAll(f.page(), "%RESPONSE_CODE_DETAILS%", ""), "%")
	}
	require.ElementsMatch(t, documented, configured)
}
