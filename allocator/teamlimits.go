package allocator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/teams"
	"github.com/berth-sandbox/berth/internal/wait"
)

// limitsEvery is the pause between reads of the file with the limits of the teams.
const limitsEvery = 5 * time.Second

// teamLimits are the limits of the teams, from a YAML file:
//
//	default: {maxSandboxes: 100, claimsPerSecond: 10, maxWaiting: 50}
//	named:
//	  ann: {maxSandboxes: 500}
//
// A field that a named team does not have is that of default. A field that default does not have is
// no limit, and so is 0. A file with an error changes nothing: the error is logged, and the limits
// that were read before stay. Its methods may be called concurrently.
type teamLimits struct {
	file string // empty: there are no limits
	log  *zap.Logger

	mu       sync.Mutex
	raw      []byte // of the last read, also of a file with an error
	settings teams.Settings
}

// newTeamLimits reads a file. An error in it is an error.
func newTeamLimits(file string, log *zap.Logger) (*teamLimits, error) {
	l := &teamLimits{file: file, log: log}
	if file == "" {
		return l, nil
	}
	var err error
	if l.raw, err = os.ReadFile(file); err != nil {
		return nil, err
	}
	if l.settings, err = parseLimits(l.raw); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return l, nil
}

// current returns the limits.
func (l *teamLimits) current() teams.Settings {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.settings
}

// run passes changed limits on until ctx ends.
func (l *teamLimits) run(ctx context.Context, submit func(core.Event)) {
	if l.file == "" {
		return
	}
	for {
		if l.read() {
			submit(core.TeamLimits{Settings: l.current()})
		}
		if !wait.Sleep(ctx, limitsEvery) {
			return
		}
	}
}

// read reads the file again, and reports whether the limits may have changed.
func (l *teamLimits) read() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	raw, err := os.ReadFile(l.file)
	if err == nil {
		if bytes.Equal(raw, l.raw) {
			return false
		}
		l.raw = raw
		var settings teams.Settings
		if settings, err = parseLimits(raw); err == nil {
			l.settings = settings
			l.log.Info("the limits of the teams were read again", zap.String("file", l.file), zap.Int("namedTeams", len(settings.Teams)))
			return true
		}
	}
	l.log.Error("the limits of the teams cannot be read; those that were read before stay", zap.String("file", l.file), zap.Error(err))
	return false
}

// limitsFile is the form of the file.
type limitsFile struct {
	Default limitsOf            `json:"default"`
	Named   map[string]limitsOf `json:"named"`
}

type limitsOf struct {
	MaxSandboxes    *int     `json:"maxSandboxes"`
	MaxWaiting      *int     `json:"maxWaiting"`
	ClaimsPerSecond *float64 `json:"claimsPerSecond"`
}

// parseLimits reads the content of a file. It names every field that is wrong.
func parseLimits(raw []byte) (teams.Settings, error) {
	var file limitsFile
	content, err := yaml.YAMLToJSONStrict(raw)
	if err != nil {
		return teams.Settings{}, err
	}
	unknown, err := kjson.UnmarshalStrict(content, &file)
	if err = errors.Join(append(unknown, err)...); err != nil {
		return teams.Settings{}, err
	}
	s := teams.Settings{Teams: map[string]teams.Limits{}}
	err = file.Default.apply("default", &s.Default)
	for _, team := range slices.Sorted(maps.Keys(file.Named)) {
		limits := s.Default
		err = errors.Join(err, file.Named[team].apply(fmt.Sprintf("named.%s", team), &limits))
		s.Teams[team] = limits
	}
	return s, err
}

// maxRate bounds claimsPerSecond, so that the sum of a bucket is exact.
const maxRate = 1e6

// apply sets the limits that the file has.
func (o limitsOf) apply(path string, to *teams.Limits) error {
	var errs []error
	for _, field := range []struct {
		name string
		from *int
		to   *int
	}{{"maxSandboxes", o.MaxSandboxes, &to.MaxSandboxes}, {"maxWaiting", o.MaxWaiting, &to.MaxWaiting}} {
		switch {
		case field.from == nil:
		case *field.from < 0:
			errs = append(errs, fmt.Errorf("%s.%s: %d: must be 0, for no limit, or more", path, field.name, *field.from))
		default:
			*field.to = *field.from
		}
	}
	if rate := o.ClaimsPerSecond; rate != nil {
		if to.ClaimsPerSecond = *rate; *rate < 0 || *rate > maxRate || math.IsNaN(*rate) {
			errs = append(errs, fmt.Errorf("%s.claimsPerSecond: %v: must be 0, for no limit, to %v", path, *rate, maxRate))
		}
	}
	return errors.Join(errs...)
}
