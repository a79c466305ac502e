package envoy

import (
	"time"

	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	connectionsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	heapv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	"google.golang.org/protobuf/proto"
)

// overload protects Envoy from overload. Connections above the limit are closed at once and
// never wait. Open requests continue.
func (b *builder) overload() *overloadv3.OverloadManager {
	monitor := func(name string, config proto.Message) *overloadv3.ResourceMonitor {
		return &overloadv3.ResourceMonitor{
			Name: name, ConfigType: &overloadv3.ResourceMonitor_TypedConfig{TypedConfig: b.any(config)},
		}
	}
	m := &overloadv3.OverloadManager{
		RefreshInterval: seconds(250 * time.Millisecond),
		ResourceMonitors: []*overloadv3.ResourceMonitor{monitor("envoy.resource_monitors.global_downstream_max_connections",
			&connectionsv3.DownstreamConnectionsConfig{MaxActiveDownstreamConnections: int64(b.MaxConnections)})},
	}
	if b.MaxHeap == 0 {
		return m
	}
	const heap = "envoy.resource_monitors.fixed_heap"
	m.ResourceMonitors = append(m.ResourceMonitors, monitor(heap, &heapv3.FixedHeapConfig{MaxHeapSizeBytes: b.MaxHeap}))
	for _, action := range []struct {
		name string
		at   float64 // share of the heap
	}{
		{"envoy.overload_actions.shrink_heap", 0.90},
		{"envoy.overload_actions.disable_http_keepalive", 0.92},
		{"envoy.overload_actions.stop_accepting_requests", 0.95},
	} {
		m.Actions = append(m.Actions, &overloadv3.OverloadAction{Name: action.name, Triggers: []*overloadv3.Trigger{{
			Name: heap, TriggerOneof: &overloadv3.Trigger_Threshold{Threshold: &overloadv3.ThresholdTrigger{Value: action.at}},
		}}})
	}
	return m
}
