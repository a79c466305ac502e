package processnode

import (
	"context"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/devcluster/scheduler"
)

// RunScheduler binds pods of the default scheduler to ready, uncordoned process
// nodes until ctx ends, as package scheduler does. log may be nil.
func RunScheduler(ctx context.Context, client kubernetes.Interface, log *zap.Logger) error {
	return scheduler.Run(ctx, scheduler.Options{Client: client, InstanceType: InstanceType, MaxPods: maxPods, Log: log})
}
