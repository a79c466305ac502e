package rest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Bounds of a call for logs.
const (
	maxLines = 1000
	// logRead is how many bytes of a log are read, logKept how many of them are answered with.
	logRead = 16 << 20
	logKept = 1 << 20
	// logLine bounds a line; the rest of a longer one is dropped.
	logLine = 16 << 10
	logWait = 8 * time.Second
)

// logQuery selects lines of a log.
type logQuery struct {
	limit int
	// from and before bound the times of the lines; zero: no bound.
	from, before time.Time
	// last: of too many lines those at the end are kept.
	last   bool
	search string
}

// line is a line of a log.
type line struct {
	at   time.Time
	text string
}

// logs answers in the form of E2B's first generation.
func (a *api) logs(w *reply, r *http.Request) error {
	limit, err := decodeLimit(r, maxLines)
	if err != nil {
		return err
	}
	start, err := millis(r, "start")
	if err != nil {
		return err
	}
	lines, container, err := a.readLog(r, logQuery{limit: limit, from: start, last: start.IsZero()})
	if err != nil {
		return err
	}
	shown := openapi.SandboxLogs{LogEntries: toEntries(lines, container), Logs: make([]openapi.SandboxLogLine, 0, len(lines))}
	for _, l := range lines {
		shown.Logs = append(shown.Logs, openapi.SandboxLogLine{Timestamp: l.at, Line: l.text})
	}
	return writeJSON(w, http.StatusOK, shown)
}

// logsV2 answers in the form of E2B's second generation.
func (a *api) logsV2(w *reply, r *http.Request) error {
	limit, err := decodeLimit(r, maxLines)
	if err != nil {
		return err
	}
	cursor, err := millis(r, "cursor")
	if err != nil {
		return err
	}
	query := r.URL.Query()
	q := logQuery{limit: limit, from: cursor, last: cursor.IsZero(), search: query.Get("search")}
	backward := query.Get("direction") == "backward"
	if backward {
		q.from, q.before, q.last = time.Time{}, cursor, true
	}
	lines, container, err := a.readLog(r, q)
	if err != nil {
		return err
	}
	if level := query.Get("level"); level == "warn" || level == "error" {
		lines = nil
	}
	if backward {
		slices.Reverse(lines)
	}
	return writeJSON(w, http.StatusOK, openapi.SandboxLogsV2{Logs: toEntries(lines, container)})
}

func toEntries(lines []line, container string) []openapi.SandboxLogEntry {
	all := make([]openapi.SandboxLogEntry, 0, len(lines))
	for _, l := range lines {
		all = append(all, openapi.SandboxLogEntry{
			Timestamp: l.at, Message: l.text, Level: openapi.SandboxLogEntryLevelInfo, Fields: map[string]string{"container": container},
		})
	}
	return all
}

// millis reads a parameter in Unix milliseconds; zero: it is absent.
func millis(r *http.Request, name string) (time.Time, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return time.Time{}, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, invalid("%s: %q: must be an integer", name, text)
	}
	return time.UnixMilli(n).UTC(), nil
}

// readLog reads lines of the first container of a live sandbox.
func (a *api) readLog(r *http.Request, q logQuery) (lines []line, container string, err error) {
	s, err := a.live(r)
	if err != nil {
		return nil, "", err
	}
	if s.Phase == core.Stopped {
		return nil, "", about(s.ID, apierror.SandboxState, "this sandbox is stopped, and has no pod with a log; wake it with POST /sandboxes/{id}/connect")
	}
	ctx, cancel := context.WithTimeout(r.Context(), logWait)
	defer cancel()
	if container, err = a.firstContainer(ctx, s); err != nil {
		return nil, "", noLogs(s.ID, err)
	}
	o := inspect.LogOptions{Container: container, Since: q.from}
	if q.last && q.before.IsZero() && q.search == "" {
		o.Tail = int64(q.limit)
	}
	log, err := a.Allocator.Logs(ctx, s.Pod, o)
	if err != nil {
		return nil, "", noLogs(s.ID, err)
	}
	defer log.Close()
	lines, err = selectLines(io.LimitReader(log, logRead), q)
	return lines, container, err
}

func (a *api) firstContainer(ctx context.Context, s core.Sandbox) (string, error) {
	p, err := a.Allocator.Pod(ctx, s.Pod)
	if err != nil {
		return "", err
	}
	return p.Object.Spec.Containers[0].Name, nil
}

// selectLines reads a log whose lines begin with their times. A line without one belongs to the time of
// the line before.
func selectLines(log io.Reader, q logQuery) (lines []line, err error) {
	reader := bufio.NewReaderSize(log, logLine)
	var at time.Time
	kept := 0
	for {
		raw, more, err := reader.ReadLine()
		text := strings.ToValidUTF8(string(raw), "\uFFFD")
		for more && err == nil {
			_, more, err = reader.ReadLine()
		}
		if errors.Is(err, io.EOF) {
			return lines, nil
		} else if err != nil {
			return nil, err
		}
		if stamp, rest, ok := strings.Cut(text, " "); ok {
			if t, err := time.Parse(time.RFC3339Nano, stamp); err == nil {
				at, text = t.UTC(), rest
			}
		}
		switch {
		case !q.before.IsZero() && !at.Before(q.before):
			return lines, nil
		case at.Before(q.from) || !strings.Contains(text, q.search):
			continue
		}
		lines, kept = append(lines, line{at, text}), kept+len(text)
		for len(lines) > q.limit || kept > logKept {
			if !q.last {
				return lines[:len(lines)-1], nil
			}
			kept -= len(lines[0].text)
			lines = lines[1:]
		}
		if !q.last && len(lines) == q.limit {
			return lines, nil
		}
	}
}
