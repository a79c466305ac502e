package lastactive_test

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
)

func Example() {
	pod := netip.MustParseAddrPort("10.0.0.1:8080")
	now := time.Hour
	open := map[look.Host]int{{AddrPort: pod}: 1} // what Envoy says
	t, err := lastactive.New(lastactive.Options{
		Now: func() time.Duration { return now }, ConnectWindow: 5 * time.Second,
		Look: func(context.Context) (look.Look, error) { return look.Look{Gateway: "envoy", Hosts: open}, nil },
	})
	if err != nil {
		panic(err)
	}
	t.Expect("k3x9", pod.Addr(), 0)
	e, _ := t.Begin(key("k3x9"), pod, false) // a request is about to be admitted
	e.Read()                                 // it was, and Envoy has read the answer
	now += time.Second
	t.Look(context.Background()) // Run does that
	fmt.Println(t.Report(false).Activities)

	clear(open) // it has ended
	now += time.Second
	t.Look(context.Background())
	now += time.Minute
	fmt.Println(t.Report(false).Activities)
	t.Forget("k3x9") // it was released
	fmt.Println(t.Len())
	// Output:
	// [{k3x9 10.0.0.1 0s 1 0 open}]
	// [{k3x9 10.0.0.1 1m0s 0 0 open}]
	// 0
}
