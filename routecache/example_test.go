package routecache_test

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/routecache"
)

// example is a cache that is fresh for an hour and whose questions are answered
// by answer.
func example(answer func(c *routecache.Cache, id string)) *routecache.Cache {
	var c *routecache.Cache
	c, err := routecache.New(routecache.Options{
		Now: func() time.Duration { return 0 },
		Ask: func(id string, _ bool) bool {
			if answer == nil {
				return false // no connection
			}
			answer(c, id)
			return true
		},
	})
	if err != nil {
		panic(err)
	}
	c.SetFreshUntil(time.Hour)
	return c
}

var pod = routecache.Route{Addr: netip.MustParseAddr("10.0.0.7"), DefaultPort: 8080}

func Example() {
	// The allocator's answers come on its stream; here it knows one sandbox.
	c := example(func(c *routecache.Cache, id string) {
		if id == "k3x9" {
			c.Resolve(id, routecache.Answer{Status: routecache.Routable, Route: pod})
		} else {
			c.Resolve(id, routecache.Answer{Status: routecache.Unknown})
		}
	})
	for _, id := range []string{"k3x9", "other"} {
		answer, err := c.Lookup(context.Background(), key(id))
		fmt.Println(id, answer.Status, err)
	}
	c.Release("k3x9", routecache.End{})
	answer, err := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println("k3x9", answer.Status, err)
	// Output:
	// k3x9 routable <nil>
	// other unknown <nil>
	// k3x9 gone <nil>
}

func ExampleNew() {
	_, err := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }})
	fmt.Println(err)
	// Output: routecache.Options.Now and Ask are required
}

func ExampleCache_Lookup() {
	c := example(nil)
	c.Put("k3x9", pod)
	answer, err := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(answer.Route.Addr, err)
	_, err = c.Lookup(context.Background(), key("other"))
	fmt.Println(err)
	// Output:
	// 10.0.0.7 <nil>
	// routecache: no connection to the allocator
}

func ExampleCache_Holds() {
	c := example(nil)
	c.Put("k3x9", pod)
	answer, _ := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(c.Holds(key("k3x9"), answer.Route))
	c.Release("k3x9", routecache.End{}) // while the caller was about to use it
	fmt.Println(c.Holds(key("k3x9"), answer.Route))
	// Output:
	// true
	// false
}

func ExampleCache_Put() {
	c := example(nil)
	c.Put("k3x9", pod)
	fmt.Println(c.Dump())
	// Output: [{k3x9 {10.0.0.7 8080 all 0  <nil>}}]
}

func ExampleCache_Resolve() {
	c := example(nil)
	c.Resolve("other", routecache.Answer{Status: routecache.Unknown})
	answer, err := c.Lookup(context.Background(), key("other"))
	fmt.Println(answer.Status, err)
	// Output: unknown <nil>
}

func ExampleCache_Release() {
	c := example(nil)
	c.Release("k3x9", routecache.End{})
	c.Put("k3x9", pod) // comes too late
	answer, _ := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(answer.Status)
	// Output: gone
}

func ExampleCache_Replace() {
	c := example(nil)
	c.Put("old", pod)
	c.Replace(map[string]routecache.Route{"new": pod})
	fmt.Println(c.Dump())
	// Output: [{new {10.0.0.7 8080 all 0  <nil>}}]
}

func ExampleCache_Quiesce() {
	c := example(nil)
	c.Put("k3x9", pod)
	c.Quiesce("k3x9")
	answer, _ := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(answer.Status, c.Holds(key("k3x9"), pod))
	c.Resume("k3x9")
	fmt.Println(c.Holds(key("k3x9"), pod))
	// Output:
	// quiesced false
	// true
}

func ExampleCache_SetFreshUntil() {
	now := time.Duration(0)
	c, _ := routecache.New(routecache.Options{Now: func() time.Duration { return now }, Ask: func(string, bool) bool { return true }})
	c.Put("k3x9", pod)
	c.SetFreshUntil(time.Minute)
	_, err := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(err)
	now = time.Minute
	_, err = c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(err)
	// Output:
	// <nil>
	// routecache: not fresh
}

func ExampleCache_Fresh() {
	c, _ := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return true }})
	fmt.Println(c.Fresh())
	// Output: false
}

func ExampleCache_Disconnected() {
	c := example(func(c *routecache.Cache, _ string) { c.Disconnected() }) // the stream breaks
	_, err := c.Lookup(context.Background(), key("k3x9"))
	fmt.Println(err)
	// Output: routecache: no connection to the allocator
}

func ExampleCache_Dump() {
	c := example(nil)
	c.Put("a", pod)
	c.Put("b", pod)
	_, _ = c.Lookup(context.Background(), key("a"))
	for _, e := range c.Dump() { // most recently used last
		fmt.Println(e.ID, e.Route.Addr)
	}
	// Output:
	// b 10.0.0.7
	// a 10.0.0.7
}

func ExampleCache_Stats() {
	c := example(nil)
	c.Put("a", pod)
	_, _ = c.Find(key("a"))
	_, _ = c.Lookup(context.Background(), key("a")) // the same request
	_, _ = c.Lookup(context.Background(), key("b"))
	s := c.Stats()
	fmt.Println(s.Hits, "hit,", s.Misses, "miss,", s.Routes, "route")
	// Output: 1 hit, 1 miss, 1 route
}

func ExampleNewPorts() {
	ports := routecache.NewPorts([]uint16{49983, 8080})
	fmt.Println(ports, ports == routecache.NewPorts([]uint16{8080, 49983}))
	fmt.Println(routecache.NewPorts(nil))
	// Output:
	// 8080, 49983 true
	// all
}

func ExamplePorts_Allows() {
	ports := routecache.NewPorts([]uint16{8080})
	fmt.Println(ports.Allows(8080), ports.Allows(22))
	fmt.Println(routecache.Ports{}.Allows(22)) // the zero value is all
	// Output:
	// true false
	// true
}

func ExamplePorts_List() {
	fmt.Println(routecache.NewPorts([]uint16{49983, 8080}).List())
	// Output: [8080 49983]
}

func ExamplePorts_String() {
	fmt.Println(routecache.NewPorts([]uint16{8080}).String(), routecache.Ports{}.String())
	// Output: 8080 all
}

func ExampleStatus_String() {
	fmt.Println(routecache.Unknown, routecache.Routable, routecache.Gone)
	// Output: unknown routable gone
}
