package policy

import (
	"testing"

	"go.uber.org/goleak"
)

// all is short for All in tables.
const all = All

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
