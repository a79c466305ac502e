package controlv1

import "time"

// MinEgressMaxStale is the least max-stale of an egress router. Its Envoy ends what a router that hangs has admitted within
// 15 s (envoy.EgressRouterLoss), and the session must not expire before that.
const MinEgressMaxStale = 20 * time.Second
