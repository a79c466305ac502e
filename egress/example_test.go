package egress_test

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
)

func ExampleServer() {
	router, err := egress.New(egress.Options{
		Socket:   "/run/berth/egress.sock",
		Resolver: net.DefaultResolver,
		Fresh:    func() bool { return true }, // the session with the leader holds
		Log:      zap.NewNop(),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	// The snapshot of the leader. From here on requests are admitted.
	err = router.Replace([]egress.Sandbox{{
		ID: "abc", Addr: netip.MustParseAddr("10.1.2.3"), TokenHash: sha256.Sum256([]byte("token")),
		Policy: policy.Policy{Ports: []uint16{443}},
	}})
	fmt.Println(err)
	counts, known := router.Counts("abc")
	fmt.Println(counts.Open, known)
	router.Forget("abc")
	router.Barrier(func() { fmt.Println("the release may be acknowledged: none of its requests is left at Envoy") })
	// Output:
	// <nil>
	// 0 true
	// the release may be acknowledged: none of its requests is left at Envoy
}
