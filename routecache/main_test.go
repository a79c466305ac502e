package routecache_test

import (
	"github.com/berth-sandbox/berth/api/sandboxid"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = sandboxid.MustKey
