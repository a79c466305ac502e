package kwok

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/devcluster"
)

// actEnv has this test binary run KWOK nodes until it is killed.
const actEnv = "BERTH_KWOK_TEST_ACT"

func TestMain(m *testing.M) {
	if os.Getenv(actEnv) != "" {
		fmt.Fprintln(os.Stderr, act())
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

func act() error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := devcluster.Up(ctx, devcluster.Options{})
	if err != nil {
		return err
	}
	n, err := Start(ctx, c, Options{Nodes: Names("kwok", 1)})
	if err != nil {
		return errors.Join(err, c.Down(ctx))
	}
	fmt.Println(n.kwok.Pid())
	<-make(chan struct{})
	return nil
}
