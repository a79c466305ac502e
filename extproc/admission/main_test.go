package admission

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = sandboxid.MustKey
