package egress

import (
	"strconv"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/h2"
)

// logMethod is what Envoy calls with the entries of its access log.
const logMethod = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

// traffic counts the bytes of requests, which Envoy says in its access log. It implements h2.Handler. A call of Envoy
// has any number of messages. What gets lost on the way is not counted.
type traffic struct{ of *Server }

// flow is one request: the peer of its connection, and when it began. A connection has one request at a time.
type flow struct {
	peer  string
	port  uint32
	began time.Time
}

// moved is how many bytes a request has sent and received.
type moved struct{ sent, received uint64 }

// flowsAge is how long the bytes of a request are kept at least after an entry that is not its last. An open request
// has one each envoy.EgressCountsAge.
const flowsAge = 4 * envoy.EgressCountsAge

// flows have what was counted of requests that were in progress. The entries of a request say all of its bytes each
// time. The lock of the table guards them.
type flows struct {
	newest, older map[flow]moved
	renewed       time.Time
}

// more returns what an entry adds to those before it. open: it is not the last one of its request.
func (f *flows) more(of flow, now moved, open bool) moved {
	if since := time.Since(f.renewed); since > flowsAge {
		f.older, f.newest, f.renewed = f.newest, map[flow]moved{}, time.Now()
	}
	before, ok := f.newest[of]
	if !ok {
		before = f.older[of]
	}
	// Envoy counts anew when it sends a request again.
	total := moved{max(before.sent, now.sent), max(before.received, now.received)}
	if open {
		f.newest[of] = total
	}
	return moved{total.sent - before.sent, total.received - before.received}
}

// Now implements h2.Handler.
func (t traffic) Now(message []byte, _ string) (h2.Reply, h2.Later) {
	var all []*accesslogv3.AccessLogCommon
	err := each(message, func(number protowire.Number, _, logs []byte) error {
		if number != streamHTTPLogs {
			return nil
		}
		return each(logs, func(number protowire.Number, _, entry []byte) error {
			if number != logsEntry {
				return nil
			}
			return each(entry, func(number protowire.Number, _, common []byte) error {
				if number != entryCommon {
					return nil
				}
				m, err := readCommon(common)
				all = append(all, m)
				return err
			})
		})
	})
	if err != nil {
		return h2.Reply{Status: codes.Internal, Text: "the message is no StreamAccessLogsMessage: " + err.Error()}, nil
	}
	t.of.count(all)
	return h2.Reply{Next: true}, nil
}

// readCommon reads only what Envoy itself has written. Other fields have text of the client, which may be none.
func readCommon(raw []byte) (*accesslogv3.AccessLogCommon, error) {
	var own []byte
	err := each(raw, func(number protowire.Number, field, _ []byte) error {
		switch number {
		case commonStart, commonMetadata, commonPeer, commonSent, commonReceived, commonType:
			own = append(own, field...)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var m accesslogv3.AccessLogCommon
	return &m, proto.Unmarshal(own, &m)
}

// count counts the bytes of some entries.
func (s *Server) count(all []*accesslogv3.AccessLogCommon) {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	for _, m := range all {
		fields := m.GetMetadata().GetFilterMetadata()[envoy.MetadataNamespace].GetFields()
		peer := m.GetDownstreamDirectRemoteAddress().GetSocketAddress()
		of := flow{peer.GetAddress(), peer.GetPortValue(), m.GetStartTime().AsTime()}
		more := s.table.flows.more(of, moved{m.GetUpstreamWireBytesSent(), m.GetUpstreamWireBytesReceived()},
			m.GetAccessLogType() == accesslogv3.AccessLogType_DownstreamPeriodic)
		s.metrics.sent.Add(float64(more.sent))
		s.metrics.received.Add(float64(more.received))
		e := s.table.all[fields[envoy.MetadataID].GetStringValue()]
		if e == nil || strconv.FormatUint(e.Incarnation, 10) != fields[envoy.MetadataIncarnation].GetStringValue() {
			continue // it has ended
		}
		e.counts.Sent += more.sent
		e.counts.Received += more.received
	}
}

// The numbers of fields.
const (
	streamHTTPLogs = 2 // of StreamAccessLogsMessage
	logsEntry      = 1 // of HTTPAccessLogEntries
	entryCommon    = 1 // of HTTPAccessLogEntry
	// Of AccessLogCommon: start_time, metadata, downstream_direct_remote_address, upstream_wire_bytes_sent and _received,
	// and access_log_type.
	commonStart, commonMetadata, commonPeer, commonSent, commonReceived, commonType = 5, 17, 20, 31, 32, 33
)

// each calls f with each field of a message: all of its bytes, and its content if it is bytes or a message.
func each(message []byte, f func(number protowire.Number, field, content []byte) error) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeField(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		var content []byte
		if kind == protowire.BytesType {
			content, _ = protowire.ConsumeBytes(message[protowire.SizeTag(number):])
		}
		if err := f(number, message[:n], content); err != nil {
			return err
		}
		message = message[n:]
	}
	return nil
}
