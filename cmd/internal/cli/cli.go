package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"reflect"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/berth-sandbox/berth/internal/printable"
	"github.com/berth-sandbox/berth/internal/version"
)

// Parse reads args into a pointer to a struct with kong's tags. Each flag can also be set in the
// environment, as the prefix and the flag's name in upper case; with the prefix "" only flags that
// name a variable. Errors name the flag, and have ExitUsage. A field of type kong.VersionFlag
// prints Version. Like --help, it works without the required flags. The error is ErrHelp after
// --help and --version.
func Parse(into any, name, description, prefix string, args []string, stdout, stderr io.Writer) (*kong.Context, error) {
	exited := false
	options := []kong.Option{
		kong.Name(name), kong.Description(description), kong.Writers(stdout, stderr),
		kong.Vars{"version": Version()},
		kong.Exit(func(int) { exited = true }), kong.TypeMapper(reflect.TypeFor[time.Duration](), kong.MapperFunc(duration)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}), kong.Help(printHelp),
	}
	if prefix != "" {
		options = append(options, kong.DefaultEnvars(prefix))
	}
	parser, err := kong.New(into, options...)
	if err != nil {
		return nil, fmt.Errorf("flags: %w", err)
	}
	k, err := parser.Parse(args)
	if exited {
		return nil, ErrHelp
	}
	if err != nil {
		var wrong *kong.ParseError
		if errors.As(err, &wrong) && wrong.Context != nil && wrong.Context.Selected() != nil {
			name = wrong.Context.Selected().FullPath()
		}
		if i := slices.IndexFunc(args, negative.MatchString); i >= 0 && strings.Contains(err.Error(), "unknown flag -") {
			err = fmt.Errorf("%s: must not be negative", args[i])
		}
		return nil, WithExitCode(ExitUsage, fmt.Errorf("%w; see %s --help", err, name))
	}
	return k, nil
}

// negative is an argument that kong takes for a flag.
var negative = regexp.MustCompile(`^-[0-9]`)

// duration reads a duration, and tells a person who leaves out the unit what to write.
func duration(ctx *kong.DecodeContext, target reflect.Value) error {
	var text string
	if err := ctx.Scan.PopValueInto("duration", &text); err != nil {
		return err
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		example := "30s or 5m"
		if n, err := strconv.ParseUint(text, 10, 31); err == nil {
			example = fmt.Sprintf("%ds or 5m", n)
		}
		return fmt.Errorf("%q: must be a duration with a unit, such as %s", text, example)
	}
	target.SetInt(int64(d))
	return nil
}

// printHelp prints kong's help with its first line, the usage, broken at 80 columns.
func printHelp(options kong.HelpOptions, ctx *kong.Context) error {
	out := ctx.Stdout
	defer func() { ctx.Stdout = out }()
	var text strings.Builder
	ctx.Stdout = &text
	if err := kong.DefaultHelpPrinter(options, ctx); err != nil {
		return err
	}
	usage, rest, _ := strings.Cut(text.String(), "\n")
	const width = 80
	broken, column := "", 0
	for i, word := range strings.Split(usage, " ") {
		switch {
		case i == 0:
		case column+1+len(word) > width:
			broken, column = broken+"\n   ", 3
			fallthrough
		default:
			broken, column = broken+" ", column+1
		}
		broken, column = broken+word, column+len(word)
	}
	_, err := fmt.Fprintf(out, "%s\n%s", broken, rest)
	return err
}

// release is the version of the programs in an image. The linker sets it, see tools/images.
var release string

// Version returns the version that the image was built as, otherwise version.Number and the
// commit, if it is known.
func Version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return version.Number + " " + s.Value[:12]
			}
		}
	}
	return version.Number
}

// Main runs a command until it returns; SIGTERM and SIGINT end its context. If it fails, the
// process ends with the error on stderr and the status of WithExitCode, or 1.
func Main(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	main(run, func(w io.Writer, err error) { fmt.Fprintln(printable.Writer(w), "error:", err) })
}

// MainOfService is Main for a program that writes a log. The error is the last line of the log,
// in its format.
func MainOfService(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	main(run, Fatal)
}

// fatalTimeout bounds the writing of the error, because the reader of stderr may be stuck and the
// process must end.
const fatalTimeout = time.Second

func main(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error, report func(io.Writer, error)) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err == nil || errors.Is(err, ErrHelp) {
		return
	}
	reported := make(chan struct{})
	go func() {
		defer close(reported)
		report(os.Stderr, err)
	}()
	select {
	case <-reported:
	case <-time.After(fatalTimeout):
	}
	os.Exit(ExitCode(err))
}

// Fatal writes the error that ends a service as a line of its log.
func Fatal(w io.Writer, err error) {
	newLogger(zapcore.ErrorLevel, w).Error("ended with an error", zap.Error(err))
}

// Logger returns a log that writes JSON lines, or readable lines if w is a terminal.
func Logger(level string, w io.Writer) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("--log-level %q: must be debug, info, warn or error", level)
	}
	return newLogger(l, w), nil
}

func newLogger(level zapcore.Level, w io.Writer) *zap.Logger {
	config := zap.NewProductionEncoderConfig()
	config.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	config.TimeKey = "time"
	encoder := zapcore.NewJSONEncoder(config)
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		config.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		config.EncodeLevel = zapcore.CapitalLevelEncoder // colours would be escaped, as all that a client has sent is
		encoder = zapcore.NewConsoleEncoder(config)
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(printable.Writer(w))), level))
}

// Loopback reports whether only this machine can reach the address, a host:port.
func Loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// Advertisable reports whether other machines can use an address: it has a port, and a host that
// is a DNS name or an IP address other than a wildcard. An unexpanded variable such as $(POD_IP)
// is not valid.
func Advertisable(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return false
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return !ip.Unmap().IsUnspecified() && ip.Zone() == ""
	}
	return len(validation.IsDNS1123Subdomain(strings.ToLower(strings.TrimSuffix(host, ".")))) == 0
}
