package extproc

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// grpcGo: the servers of newOptions use grpc-go.
var grpcGo bool

func TestMain(m *testing.M) { goleak.VerifyTestMain(overBoth{m}) }

// overBoth runs all tests with grpc-go, and then with package h2.
type overBoth struct{ *testing.M }

func (b overBoth) Run() int {
	flag.Parse()
	for _, once := range []string{"test.bench", "test.fuzz"} {
		if flag.Lookup(once).Value.String() != "" {
			return b.M.Run()
		}
	}
	grpcGo = true
	code := b.M.Run()
	grpcGo = false
	return max(code, b.M.Run())
}

var key = sandboxid.MustKey
