// Command go claims a sandbox for a job. The claim can be repeated: if this program ends early and
// runs again, it gets the same sandbox.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
)

func main() {
	if err := run(context.Background(), "job-"+os.Getenv("JOB")); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, job string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	pool := os.Getenv("POOL")
	c, err := client.New(client.Options{
		URL: os.Getenv("BERTH_API_URL"), Key: os.Getenv("BERTH_API_KEY"), Gateway: os.Getenv("BERTH_GATEWAY"),
	})
	if err != nil {
		return err
	}
	s, err := c.ClaimOnce(ctx, job, openapi.NewSandbox{
		TemplateID: pool, Timeout: new(int64(300)), WaitTimeout: new(int64(30)), Metadata: map[string]string{"job": job},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Kill(context.WithoutCancel(ctx), s.SandboxID)) }()

	for mine, err := range c.List(ctx, openapi.ListSandboxesParams{Template: &pool, Metadata: new("job=" + job)}) {
		if err != nil {
			return err
		}
		fmt.Println("sandbox of", mine.Metadata["job"], "ends in", time.Until(mine.EndAt).Round(time.Minute))
	}
	url, err := client.URL(s, 8080)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"hello", http.NoBody)
	if err != nil {
		return err
	}
	answer, err := c.Sandboxes().Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	fmt.Printf("%s %s", answer.Status, body)
	return err
}
