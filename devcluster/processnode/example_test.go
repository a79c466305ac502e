package processnode_test

import (
	"context"
	"errors"
	"log"
	"net/netip"
	"os/signal"
	"syscall"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/devcluster/nodes"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/processnode"
)

// A node and the scheduler that binds pods to it, until Ctrl-C.
func ExampleNode_Run() {
	if err := runNode(); err != nil {
		log.Fatal(err)
	}
}

func runNode() error {
	config, err := clientcmd.BuildConfigFromFlags("", "kubeconfig")
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	supervisor, err := proc.New()
	if err != nil {
		return err
	}
	defer supervisor.Close() // after the node: kills what is left
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT)
	defer stop()
	node, err := processnode.New(ctx, processnode.Options{
		Client:     client,
		Name:       "node-0",
		Supervisor: supervisor,
		Addresses:  netip.MustParsePrefix("127.20.0.0/24"),
		Path:       []string{"bin"},
		Dir:        "node-0",
		Log:        zap.NewNop(),
	})
	if err != nil {
		return err
	}
	scheduled := make(chan error, 1)
	go func() {
		scheduler := nodes.Scheduler{Client: client, Kind: processnode.Kind, Log: zap.NewNop()}
		scheduled <- scheduler.Run(ctx)
	}()
	ran := node.Run(ctx)
	stop()
	return errors.Join(ran, <-scheduled)
}
