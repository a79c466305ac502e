package extproc

import (
	"context"
	"time"

	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"go.uber.org/zap"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive"
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
		s.receive(stream)
	}()
	select {
	case <-ended:
	case <-s.stopping:
	}
	// The end is no error: Envoy opens another stream when it has something to say.
	return stream.SendAndClose(&logv3.StreamAccessLogsResponse{})
}

// receive records what comes on a stream until it ends.
func (s *Server) receive(stream logv3.AccessLogService_StreamAccessLogsServer) {
	m, err := stream.Recv()
	if err != nil {
		return // it has said nothing, and nothing can be missing
	}
	s.meet()
	log := s.openLog(m.GetIdentifier().GetLogName())
	defer func() {
		select {
		case <-s.stopping:
			log.Stop() // it is this side that has ended it
		default:
			log.Close()
		}
	}()
	for ; err == nil; m, err = stream.Recv() {
		entries := logged(m)
		s.metrics.logEntries.Add(float64(len(entries)))
		log.Record(entries)
	}
}

// openLog begins a log, by the name that its first message has.
func (s *Server) openLog(name string) *lastactive.Log {
	flush, ok := envoy.AccessLogFlush(name)
	if ok && flush != s.flush {
		s.mismatch(flush)
	}
	return s.decider.activity.OpenLog(flush) // 0 if it is not said
}

func (s *Server) mismatch(flush time.Duration) {
	s.metrics.flushMismatches.Inc()
	s.log.Error("Envoy's access log flush interval is not this router's: give both the same --access-log-flush; if Envoy's is longer, no sandbox is released for being idle meanwhile",
		zap.Duration("envoy", flush), zap.Duration("router", s.flush))
}

// announced takes the flush interval that Envoy sends with each request: a log that has
// nothing to say yet has not been opened.
func (s *Server) announced(ctx context.Context) {
	values := grpcmetadata.ValueFromIncomingContext(ctx, envoy.MetadataFlush)
	if len(values) == 0 || values[0] == s.flushText {
		return
	}
	flush, err := time.ParseDuration(values[0])
	if err != nil || flush <= 0 {
		return // it is not from our configuration
	}
	if s.announcedFlush.Swap(int64(flush)) != int64(flush) {
		s.mismatch(flush) // once, and not with each request
	}
	s.decider.activity.Announce(flush)
}

// logged is what a message says of activity.
func logged(m *logv3.StreamAccessLogsMessage) []lastactive.LogEntry {
	received := m.GetHttpLogs().GetLogEntry()
	entries := make([]lastactive.LogEntry, 0, len(received))
	for _, e := range received {
		c := e.GetCommonProperties()
		fields := c.GetMetadata().GetFilterMetadata()[envoy.MetadataNamespace].GetFields()
		entries = append(entries, lastactive.LogEntry{
			// Empty: the request has not been admitted yet, or never was.
			ID:     fields[envoy.MetadataID].GetStringValue(),
			Stream: c.GetStreamId(),
			Bytes:  c.GetDownstreamWireBytesReceived() + c.GetDownstreamWireBytesSent(),
			End:    c.GetAccessLogType() == datav3.AccessLogType_DownstreamEnd,
		})
	}
	return entries
}
