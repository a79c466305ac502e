package policy_test

import (
	"fmt"
	"net/netip"

	"github.com/berth-sandbox/berth/egress/policy"
)

func Example() {
	claim, err := policy.Parse(
		policy.List{Field: "network.allowOut", Entries: []string{"*.example.com"}},
		policy.List{Field: "network.denyOut", Entries: []string{"0.0.0.0/0"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	p := policy.Policy{Claim: claim}
	for _, authority := range []string{"API.example.com.:443", "example.org:443", "api.example.com:22", "localhost:443"} {
		d, err := policy.Destination(authority, 0)
		if err != nil {
			fmt.Println(err)
			continue
		}
		if verdict, reason := p.Decide(d); verdict == policy.Refused {
			fmt.Println(d, "is refused:", reason)
			continue
		}
		for _, found := range []string{"10.0.0.1", "8.8.8.8"} { // what the look-up has returned
			fmt.Println(d, "at", found, p.Permits(d, netip.MustParseAddr(found)))
		}
	}
	// Output:
	// api.example.com:443 at 10.0.0.1 false
	// api.example.com:443 at 8.8.8.8 true
	// example.org:443 is refused: claim-rules
	// api.example.com:22 is refused: port
	// authority "localhost:443": the name has one label, which only search domains could resolve: write the full name
}

func ExampleParse() {
	_, err := policy.Parse(
		policy.List{Field: "network.allowOut", Entries: []string{"api.example.com", "x..y"}},
		policy.List{Field: "network.denyOut", Entries: []string{"0.0.0.0/0"}})
	fmt.Println(err)
	// Output: network.allowOut[1] "x..y": a label is empty: write one dot between labels
}
