package extproc

import (
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"

	"github.com/berth-sandbox/berth/envoy"
)

// StreamAccessLogs receives Envoy's reports: one for each request that is still
// open, every flush interval, and one at the end of a request that was long.
// Each one means that its sandbox is being used.
func (s *Server) StreamAccessLogs(stream logv3.AccessLogService_StreamAccessLogsServer) error {
	s.metrics.logStreams.Inc()
	defer s.metrics.logStreams.Dec()
	ended := make(chan struct{})
	go func() { // ends with the stream, at the latest when this handler has returned
		defer close(ended)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			s.logged(m)
		}
	}()
	select {
	case <-ended:
	case <-s.stopping:
	}
	// The end is no error: Envoy opens another stream when it has something to say.
	return stream.SendAndClose(&logv3.StreamAccessLogsResponse{})
}

func (s *Server) logged(m *logv3.StreamAccessLogsMessage) {
	for _, entry := range m.GetHttpLogs().GetLogEntry() {
		s.metrics.logEntries.Inc()
		fields := entry.GetCommonProperties().GetMetadata().GetFilterMetadata()[envoy.MetadataNamespace].GetFields()
		// Without an ID the request has not been admitted yet, or never was.
		if id := fields[envoy.MetadataID].GetStringValue(); id != "" {
			s.decider.activity.TouchKnown(id)
		}
	}
}
