package egress_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
)

func ExampleServer() {
	ctx := context.Background()
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
	err = router.Replace(ctx, []egress.Sandbox{{
		ID: "abc", Addr: netip.MustParseAddr("10.1.2.3"), TokenHash: sha256.Sum256([]byte("token")),
		Policy: policy.Policy{Ports: []uint16{443}},
	}})
	fmt.Println(err)
	counts, known := router.Counts("abc")
	fmt.Println(counts.Open, known)
	// The release may be acknowledged when Forget returns nil: none of its requests is left at Envoy.
	fmt.Println(router.Forget(ctx, "abc"))
	// Output:
	// <nil>
	// 0 true
	// <nil>
}
