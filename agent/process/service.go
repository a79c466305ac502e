package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/internal/options"
)

const (
	// maxMessage bounds a request, or a message of a stream of requests.
	maxMessage = 16 << 20
	// maxTag bounds a tag in bytes. It is kept as long as its process.
	maxTag = 1 << 10
	// keepaliveHeader has the seconds of silence after which a stream sends a keepalive.
	keepaliveHeader  = "Keepalive-Ping-Interval"
	defaultKeepalive = 90 * time.Second
	maxKeepalive     = 24 * time.Hour
	// killWait is how long the answer to SIGKILL waits for the end of the process. A process that waits for a
	// device ends later.
	killWait = 100 * time.Millisecond
)

// Sandbox is what processes run in.
type Sandbox interface {
	// Account returns the account of this name. "" is the default one. The error is an
	// *accounts.UnknownError if calls must not act as it.
	Account(name string) (accounts.Account, error)
	// Config returns the configuration of the sandbox.
	Config() *initbox.Config
}

// Options are what a Service is made of.
type Options struct {
	Sandbox  Sandbox
	Children *children.Table
	// Freezer is that of Children.
	Freezer *freeze.Freezer
}

// Service implements processpb.ProcessHandler. Its methods may be called concurrently.
type Service struct {
	o        Options
	killWait time.Duration

	mu sync.Mutex
	// running has the processes that have not ended.
	running map[*running]struct{}
	// dropping has those that have ended and whose output others still write.
	dropping map[*running]struct{}
	started  uint64 // processes so far
	closed   bool
	// ended is done when both are empty.
	ended sync.WaitGroup
}

var _ processpb.ProcessHandler = (*Service)(nil)

// New returns a Service without processes. Close it.
func New(o Options) (*Service, error) {
	if err := options.Require(o, "Sandbox", "Children", "Freezer"); err != nil {
		return nil, err
	}
	return &Service{
		o: o, killWait: killWait, running: make(map[*running]struct{}), dropping: make(map[*running]struct{}),
	}, nil
}

// Handler returns the pattern and the handler of the service's calls.
func (s *Service) Handler() (string, http.Handler) {
	pattern, h := processpb.NewProcessHandler(s, connect.WithReadMaxBytes(maxMessage))
	return pattern, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), clientKey{}, r.Context())))
	})
}

// clientKey is the key of the context of the client's connection, which has no deadline, in that of a call.
type clientKey struct{}

// timed returns the context of a stream without the deadline of its call, and calls expire when the sandbox was awake
// until then. Call stop.
func (s *Service) timed(ctx context.Context, expire func()) (client context.Context, stop func()) {
	client = ctx.Value(clientKey{}).(context.Context)
	deadline, ok := ctx.Deadline()
	if !ok {
		return client, func() {}
	}
	return client, s.o.Freezer.AfterFunc(time.Until(deadline), expire)
}

// Running returns how many processes run.
func (s *Service) Running() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.running)
}

// Signal sends a signal to the groups of all processes.
func (s *Service) Signal(signal syscall.Signal) {
	for _, p := range s.all() {
		_ = p.signal(signal) // it has ended meanwhile
	}
}

// Close kills all processes and waits until their output has been read. No process is started afterwards,
// and what others write to that output is not read any more.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	for p := range s.dropping {
		p.closeSources()
	}
	s.mu.Unlock()
	s.Signal(syscall.SIGKILL)
	s.ended.Wait()
}

// all returns the processes that run, the oldest first.
func (s *Service) all() []*running {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*running, 0, len(s.running))
	for p := range s.running {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *running) int { return cmp.Compare(a.order, b.order) })
	return all
}

// add starts to read from a process. It returns false when the service is closed.
func (s *Service) add(p *running) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.started++
	p.order = s.started
	s.running[p] = struct{}{}
	s.ended.Go(func() {
		p.run(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.running, p)
			s.dropping[p] = struct{}{}
			if s.closed {
				p.closeSources()
			}
		})
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.dropping, p)
	})
	return true
}

// find returns the process that a call selects.
func (s *Service) find(selector *processpb.ProcessSelector) (*running, error) {
	var matches func(*running) bool
	var name string
	switch by := selector.GetSelector().(type) {
	case *processpb.ProcessSelector_Pid:
		matches, name = func(p *running) bool { return p.child.PID == int(by.Pid) }, fmt.Sprintf("number %d", by.Pid)
	case *processpb.ProcessSelector_Tag:
		matches = func(p *running) bool { return p.tag != nil && *p.tag == by.Tag }
		name = fmt.Sprintf("tag %.*q", maxTag, by.Tag)
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("process: must have a pid or a tag"))
	}
	var found *running
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.running {
		if matches(p) && (found == nil || p.order > found.order) {
			found = p
		}
	}
	if found == nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no process with %s runs", name))
	}
	return found, nil
}

// List implements processpb.ProcessHandler.
func (s *Service) List(
	context.Context, *connect.Request[processpb.ListRequest],
) (*connect.Response[processpb.ListResponse], error) {
	answer := &processpb.ListResponse{}
	for _, p := range s.all() {
		answer.Processes = append(answer.Processes,
			&processpb.ProcessInfo{Config: p.config, Pid: uint32(p.child.PID), Tag: p.tag})
	}
	return connect.NewResponse(answer), nil
}

// Start implements processpb.ProcessHandler.
func (s *Service) Start(
	ctx context.Context, r *connect.Request[processpb.StartRequest],
	stream *connect.ServerStream[processpb.StartResponse],
) error {
	keepalive, err := keepaliveOf(r.Header())
	if err != nil {
		return err
	}
	account, err := s.account(r.Header())
	if err != nil {
		return err
	}
	p, err := s.start(r.Msg, account)
	if err != nil {
		return err
	}
	expired := make(chan struct{})
	client, stop := s.timed(ctx, func() {
		close(expired)
		_ = p.kill() // it has ended meanwhile
	})
	context.AfterFunc(p.input.alive, stop)
	attached := p.attach()
	defer attached.leave()
	if !s.add(p) {
		_ = p.kill() // it has ended by itself
		p.closeOwn()
		return connect.NewError(connect.CodeUnavailable, errors.New("the sandbox ends"))
	}
	return attached.stream(client, expired, keepalive, func(e *processpb.ProcessEvent) error {
		return stream.Send(&processpb.StartResponse{Event: e})
	})
}

// Connect implements processpb.ProcessHandler.
func (s *Service) Connect(
	ctx context.Context, r *connect.Request[processpb.ConnectRequest],
	stream *connect.ServerStream[processpb.ConnectResponse],
) error {
	keepalive, err := keepaliveOf(r.Header())
	if err != nil {
		return err
	}
	p, err := s.find(r.Msg.GetProcess())
	if err != nil {
		return err
	}
	expired := make(chan struct{})
	client, stop := s.timed(ctx, func() { close(expired) })
	defer stop()
	attached := p.attach()
	defer attached.leave()
	return attached.stream(client, expired, keepalive, func(e *processpb.ProcessEvent) error {
		return stream.Send(&processpb.ConnectResponse{Event: e})
	})
}

// account returns the account that a call names.
func (s *Service) account(header http.Header) (accounts.Account, error) {
	name, err := accounts.Named(header)
	if err != nil {
		return accounts.Account{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	account, err := s.o.Sandbox.Account(name)
	switch {
	case errors.As(err, new(*accounts.UnknownError)):
		return account, connect.NewError(connect.CodeUnauthenticated, err)
	case err != nil:
		return account, connect.NewError(connect.CodeInternal, err)
	}
	return account, nil
}

// keepaliveOf returns how long a stream may be silent.
func keepaliveOf(header http.Header) (time.Duration, error) {
	text := header.Get(keepaliveHeader)
	if text == "" {
		return defaultKeepalive, nil
	}
	seconds, err := strconv.ParseUint(text, 10, 32)
	if err != nil || seconds == 0 {
		return 0, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("header %s: %q is not a number of seconds from 1", keepaliveHeader, text))
	}
	return min(time.Duration(seconds)*time.Second, maxKeepalive), nil
}

// Update implements processpb.ProcessHandler.
func (s *Service) Update(
	_ context.Context, r *connect.Request[processpb.UpdateRequest],
) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := s.find(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if r.Msg.GetPty().GetSize() == nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("pty.size: must be set"))
	}
	ws, err := size(r.Msg.GetPty().GetSize())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if p.terminal == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process was started without a terminal"))
	}
	if err := p.resize(ws); err != nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("the terminal is closed: %w", err))
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), nil
}

// SendSignal implements processpb.ProcessHandler. After SIGKILL it answers when the process has ended, or after
// killWait.
func (s *Service) SendSignal(
	ctx context.Context, r *connect.Request[processpb.SendSignalRequest],
) (*connect.Response[processpb.SendSignalResponse], error) {
	p, err := s.find(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	switch r.Msg.GetSignal() {
	case processpb.Signal_SIGNAL_SIGTERM:
		err = p.signal(syscall.SIGTERM)
	case processpb.Signal_SIGNAL_SIGKILL:
		if err = p.signal(syscall.SIGKILL); err == nil {
			p.awaitEnd(ctx, s.killWait)
		}
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument,
			errors.New("signal: must be SIGNAL_SIGTERM or SIGNAL_SIGKILL"))
	}
	switch {
	case errors.Is(err, children.ErrEnded):
		return nil, connect.NewError(connect.CodeNotFound, err)
	case err != nil:
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("signal: %w", err))
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

// SendInput implements processpb.ProcessHandler.
func (s *Service) SendInput(
	ctx context.Context, r *connect.Request[processpb.SendInputRequest],
) (*connect.Response[processpb.SendInputResponse], error) {
	p, err := s.find(r.Msg.GetProcess())
	if err == nil {
		err = p.send(ctx, r.Msg.GetInput())
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), nil
}

// StreamInput implements processpb.ProcessHandler.
func (s *Service) StreamInput(
	ctx context.Context, stream *connect.ClientStream[processpb.StreamInputRequest],
) (*connect.Response[processpb.StreamInputResponse], error) {
	var p *running
	for stream.Receive() {
		var err error
		switch e := stream.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			p, err = s.find(e.Start.GetProcess())
		case *processpb.StreamInputRequest_Data:
			if p == nil {
				err = connect.NewError(connect.CodeInvalidArgument, errors.New("the first message must be start"))
			} else {
				err = p.send(ctx, e.Data.GetInput())
			}
		case *processpb.StreamInputRequest_Keepalive:
		default:
			err = connect.NewError(connect.CodeInvalidArgument, errors.New("a message must have start, data or keepalive"))
		}
		if err != nil {
			return nil, err
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.StreamInputResponse{}), nil
}

// CloseStdin implements processpb.ProcessHandler.
func (s *Service) CloseStdin(
	ctx context.Context, r *connect.Request[processpb.CloseStdinRequest],
) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := s.find(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if p.terminal != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition,
			errors.New("the process has a terminal, which is not closed: send the byte 4 (Ctrl-D) to end its input"))
	}
	if err := p.input.close(ctx); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), nil
}
