package lastactive_test

import (
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/lastactive"
)

func example(now *time.Duration) *lastactive.Tracker {
	t, err := lastactive.New(lastactive.Options{Flush: time.Second, Window: 3 * time.Second, Now: func() time.Duration { return *now }})
	if err != nil {
		panic(err)
	}
	return t
}

func Example() {
	now := time.Hour
	t := example(&now)
	e := t.Begin("k3x9", 5*time.Minute) // a request is about to be admitted
	e.Read()                            // it was, and Envoy has read the answer
	now += 10 * time.Second
	for _, a := range t.Report(false) {
		fmt.Println(a.ID, a.Age)
	}
	t.Forget("k3x9") // it was released
	fmt.Println(t.Len())
	// Output:
	// k3x9 0s
	// 0
}

func ExampleLog_Record() {
	now := time.Hour
	t := example(&now)
	l := t.OpenLog(time.Second)
	defer l.Close()
	l.Record([]lastactive.LogEntry{{ID: "k3x9", Stream: "a WebSocket", Bytes: 100}})
	now += time.Second
	activities, doubt := t.Ask([]string{"k3x9"})
	fmt.Println(activities[0].Age, activities[0].Open, doubt > 0)
	// Output: 0s 1 true
}
