package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/internal/printable"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type flags struct {
	PodCIDRs []string      `name:"pod-cidrs" required:"" help:"Ranges."`
	MaxStale time.Duration `default:"15m" help:"How long."`
	Size     int           `default:"7" help:"How many."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`
}

func parse(args ...string) (f flags, stdout string, err error) {
	var out, errs bytes.Buffer
	_, err = cli.Parse(&f, "thing", "What it is for.", "BERTH_THING", args, &out, &errs)
	return f, out.String(), err
}

func TestFlagOverridesEnvironmentOverridesDefault(t *testing.T) {
	f, _, err := parse("--pod-cidrs", "10.0.0.0/8,fd00::/8")
	require.NoError(t, err)
	require.Equal(t, flags{PodCIDRs: []string{"10.0.0.0/8", "fd00::/8"}, MaxStale: 15 * time.Minute, Size: 7}, f)

	t.Setenv("BERTH_THING_POD_CIDRS", "10.1.0.0/16,10.2.0.0/16")
	t.Setenv("BERTH_THING_MAX_STALE", "30s")
	t.Setenv("BERTH_THING_SIZE", "9")
	t.Setenv("BERTH_THING_VERSION", "3.1") // not a flag's
	f, _, err = parse()
	require.NoError(t, err)
	require.Equal(t, flags{PodCIDRs: []string{"10.1.0.0/16", "10.2.0.0/16"}, MaxStale: 30 * time.Second, Size: 9}, f)

	f, _, err = parse("--max-stale=1s", "--pod-cidrs=10.9.0.0/16")
	require.NoError(t, err)
	require.Equal(t, flags{PodCIDRs: []string{"10.9.0.0/16"}, MaxStale: time.Second, Size: 9}, f)
}

func TestErrorsNameTheFlagAndTheHelp(t *testing.T) {
	for says, args := range map[string][]string{
		"--pod-cidrs": nil,
		"--max-stale": {"--pod-cidrs=a", "--max-stale=soon"},
		"--size":      {"--pod-cidrs=a", "--size=many"},
		"--nothing":   {"--pod-cidrs=a", "--nothing"},
		"surplus":     {"--pod-cidrs=a", "surplus"},
	} {
		_, stdout, err := parse(args...)
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, err, "see thing --help")
		require.NotErrorIs(t, err, cli.ErrHelp)
		require.Empty(t, stdout)
	}
	t.Setenv("BERTH_THING_SIZE", "many")
	_, _, err := parse("--pod-cidrs=a")
	require.ErrorContains(t, err, "BERTH_THING_SIZE")
}

func TestDurationWithoutUnitSaysWhatToWrite(t *testing.T) {
	for text, says := range map[string]string{
		"300": `"300": must be a duration with a unit, such as 300s or 5m`, "soon": `"soon": must be a duration with a unit, such as 30s or 5m`,
		"": `"": must be a duration with a unit, such as 30s or 5m`, "99999999999": `"99999999999": must be a duration with a unit, such as 30s or 5m`,
	} {
		_, _, err := parse("--pod-cidrs=a", "--max-stale="+text)
		require.ErrorContains(t, err, "--max-stale: "+says)
		require.Equal(t, cli.ExitUsage, cli.ExitCode(err))
	}
	f, _, err := parse("--pod-cidrs=a", "--max-stale=1h30m")
	require.NoError(t, err)
	require.Equal(t, 90*time.Minute, f.MaxStale)
	_, _, err = parse("--pod-cidrs=a", "-5m")
	require.EqualError(t, err, "-5m: must not be negative; see thing --help")
}

func TestHelpAndVersionNeedNoOtherFlag(t *testing.T) {
	_, stdout, err := parse("--help")
	require.ErrorIs(t, err, cli.ErrHelp)
	for _, what := range []string{"What it is for.", "--pod-cidrs", "BERTH_THING_MAX_STALE", "15m"} {
		require.Contains(t, stdout, what)
	}
	_, stdout, err = parse("--version")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Equal(t, cli.Version()+"\n", stdout)
}

func TestLoggerWritesJSONFromItsLevel(t *testing.T) {
	var out bytes.Buffer
	log, err := cli.Logger("warn", &out)
	require.NoError(t, err)
	log.Info("not this")
	log.Warn("this")
	var line struct{ Time, Level, Msg string }
	require.NoError(t, json.Unmarshal(out.Bytes(), &line), out.String())
	require.Equal(t, "warn", line.Level)
	require.Equal(t, "this", line.Msg)
	_, err = time.Parse(time.RFC3339Nano, line.Time)
	require.NoError(t, err)
	_, err = cli.Logger("loud", &out)
	require.ErrorContains(t, err, "--log-level")
}

// kubectl logs shows a terminal what is in a log, which may be a client's.
//
// Invariant: P18
func TestLogsHaveNoCharacterThatTerminalsObey(t *testing.T) {
	const evil = "x\u009b2J\x7f\u202e\u2028\U000e0001\x1b[2J"
	var out bytes.Buffer
	log, err := cli.Logger("info", &out)
	require.NoError(t, err)
	log.Info(evil, zap.String("requestID", evil))
	require.Equal(t, printable.Text(out.String()), out.String())
	var line struct{ Msg, RequestID string }
	require.NoError(t, json.Unmarshal(out.Bytes(), &line), out.String())
	require.Equal(t, evil, line.Msg)
	require.Equal(t, evil, line.RequestID)
}

// The error that ends a service must be in its log.
func TestFatalErrorIsALogLine(t *testing.T) {
	var out bytes.Buffer
	cli.Fatal(&out, errors.Join(errors.New("--a: wrong"), errors.New("--b: wrong")))
	require.Equal(t, 1, bytes.Count(out.Bytes(), []byte("\n")), out.String())
	var line struct{ Time, Level, Msg, Error string }
	require.NoError(t, json.Unmarshal(out.Bytes(), &line), out.String())
	require.Equal(t, "error", line.Level)
	require.Equal(t, "--a: wrong\n--b: wrong", line.Error)
	require.NotEmpty(t, line.Msg)
	_, err := time.Parse(time.RFC3339Nano, line.Time)
	require.NoError(t, err)
}

func TestLoopback(t *testing.T) {
	for _, address := range []string{"127.0.0.1:80", "127.9.9.9:0", "localhost:80", "[::1]:80"} {
		require.True(t, cli.Loopback(address), address)
	}
	for _, address := range []string{"", ":80", "0.0.0.0:80", "[::]:80", "10.0.0.1:80", "example.com:80", "127.0.0.1", "localhost", "localhost.example.com:80", "127.1:80", "[fe80::1%lo]:80"} {
		require.False(t, cli.Loopback(address), address)
	}
}

func TestAdvertisable(t *testing.T) {
	for _, address := range []string{
		"127.0.0.1:80", "127.0.0.1:0", "[fd00::1]:80", "[10.0.0.1]:80", "localhost:80", "allocator-0.allocator:80", "Allocator.berth.svc.cluster.local.:65535",
	} {
		require.True(t, cli.Advertisable(address), address)
	}
	for _, address := range []string{
		"", ":80", "0.0.0.0:80", "[::]:80", "[::ffff:0.0.0.0]:80", "10.0.0.1", "10.0.0.1:", "10.0.0.1:http", "10.0.0.1:65536", "fd00::1:80", "[fe80::1%eth0]:80",
		"$(POD_IP):80", "a_b:80", "a b:80", "a/b:80", ".:80", "http://a:80",
	} {
		require.False(t, cli.Advertisable(address), address)
	}
}

func TestStopAnswersCallsInProgress(t *testing.T) {
	began, finish := make(chan struct{}), make(chan struct{})
	s, err := cli.Listen("--listen", "127.0.0.1:0", 10)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(began)
			<-finish
			_, _ = io.WriteString(w, "done")
		}))
	}()
	body := make(chan string, 1)
	go func() {
		r, err := http.Get("http://" + s.Addr().String())
		if err != nil {
			body <- err.Error()
			return
		}
		defer r.Body.Close()
		raw, _ := io.ReadAll(r.Body)
		body <- string(raw)
	}()
	<-began
	stopped := make(chan struct{})
	go func() { s.Stop(context.Background()); close(stopped) }()
	require.NoError(t, <-served) // it takes nothing new
	close(finish)
	require.Equal(t, "done", <-body)
	<-stopped
	http.DefaultClient.CloseIdleConnections()
}

func TestStopCutsOffSlowCalls(t *testing.T) {
	began := make(chan struct{})
	s, err := cli.Listen("--listen", "127.0.0.1:0", 10)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(began)
			<-r.Context().Done()
		}))
	}()
	failed := make(chan error, 1)
	go func() {
		r, err := http.Get("http://" + s.Addr().String())
		if err == nil {
			r.Body.Close()
		}
		failed <- err
	}()
	<-began
	over, cancel := context.WithCancel(context.Background())
	cancel()
	s.Stop(over)
	require.NoError(t, <-served)
	require.Error(t, <-failed)
	http.DefaultClient.CloseIdleConnections()
}

func TestServeAfterStopReturnsNil(t *testing.T) {
	s, err := cli.Listen("--listen", "127.0.0.1:0", 10)
	require.NoError(t, err)
	s.Stop(context.Background())
	require.NoError(t, s.Serve(http.NotFoundHandler()))
}

func TestListenNamesTheFlag(t *testing.T) {
	s, err := cli.Listen("--listen", "127.0.0.1:0", 10)
	require.NoError(t, err)
	defer s.Stop(context.Background())
	_, err = cli.Listen("--other", s.Addr().String(), 10)
	require.ErrorContains(t, err, "--other: ")
	require.False(t, errors.Is(err, http.ErrServerClosed))
}
