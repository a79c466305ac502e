package client_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
)

// Claims a sandbox of the pool "demo", moves its end, and releases it.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Options{URL: os.Getenv("BERTH_API_URL"), Key: os.Getenv("BERTH_API_KEY")})
	if err != nil {
		fmt.Println(err)
		return
	}
	s, err := c.Claim(ctx, openapi.NewSandbox{
		TemplateID: "demo", Timeout: new(int64(300)), WaitTimeout: new(int64(30)), Metadata: map[string]string{"job": "17"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	address, err := client.URL(s, 3000) // c.Sandboxes() sends requests to it
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(s.Phase, s.Metadata["job"], address != "")
	if err := c.SetTimeout(ctx, s.SandboxID, time.Hour); err != nil {
		fmt.Println(err)
		return
	}
	if err := c.Kill(ctx, s.SandboxID); err != nil {
		fmt.Println(err)
		return
	}
	// Output: running 17 true
}

// Lists the live sandboxes of a pool. Pages are read as they are needed.
func ExampleClient_List() {
	ctx := context.Background()
	c, err := client.New(client.Options{URL: os.Getenv("BERTH_API_URL"), Key: os.Getenv("BERTH_API_KEY")})
	if err != nil {
		fmt.Println(err)
		return
	}
	for s, err := range c.List(ctx, openapi.ListSandboxesParams{Template: new("demo")}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(s.SandboxID, "ends at", s.EndAt)
	}
	// Output:
}

// Tells errors apart.
func ExampleError() {
	ctx := context.Background()
	c, err := client.New(client.Options{URL: os.Getenv("BERTH_API_URL"), Key: os.Getenv("BERTH_API_KEY")})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = c.Get(ctx, "00000000000000000000")
	var answer *client.Error
	if errors.As(err, &answer) {
		fmt.Println(answer.Status, answer.Reason, client.IsNotFound(err))
	}
	// Output: 404 sandbox_not_found true
}
