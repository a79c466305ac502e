package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
)

// maxEvent bounds a line of the stream in bytes.
const maxEvent = 1 << 20

// Event is something that happened to a sandbox, or a gap. One of Sandbox and Gap is set.
type Event struct {
	// ID is the position of the event, for EventsFilter.LastEventID.
	ID      string
	Sandbox *openapi.SandboxEvent
	// Gap means that events before this position may be lost. Read the list of sandboxes.
	Gap *openapi.EventGap
}

// Events returns events as they happen, until its context ends or an error is yielded. It goes on
// where it was when a stream ends, when the connection breaks and when the leader changes. It gives
// up after four connections in a row without any progress. Options.HTTP must have no Timeout.
func (c *Client) Events(ctx context.Context, filter openapi.StreamEventsParams) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		params, failures := filter, 0
		for ctx.Err() == nil {
			progress := false
			err := c.stream(ctx, &params, func(id string, e *Event) bool {
				progress = true
				params.LastEventID = &id
				return e == nil || yield(*e, nil)
			})
			if progress {
				failures = 0
			}
			pause, again := firstPause, true
			if err != nil {
				pause, again = repeatAfter(err, failures)
				failures++
			}
			switch {
			case errors.Is(err, errStopped) || ctx.Err() != nil:
				return
			case !again || failures > maxRepeats:
				yield(Event{}, err)
				return
			}
			timer := time.NewTimer(pause)
			select {
			case <-ctx.Done():
				timer.Stop()
			case <-timer.C:
			}
		}
	}
}

// errStopped ends a stream that its reader has stopped.
var errStopped = fmt.Errorf("the reader has stopped")

// stream reads one stream to its end. It reports each new position, with its event if there is one.
func (c *Client) stream(
	ctx context.Context, params *openapi.StreamEventsParams, report func(id string, e *Event) bool,
) error {
	response, err := c.api.StreamEvents(ctx, params)
	if err != nil {
		return fmt.Errorf("call the API: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(response.Body, maxMessage*10))
		return newError(response, body)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, maxEvent)
	var id, name, data string
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case lines.Text() != "":
			switch field {
			case "id":
				id = value
			case "event":
				name = value
			case "data":
				data += value
			}
			continue
		case id == "":
			continue
		}
		var e *Event
		if data != "" {
			if e, err = newEvent(id, name, data); err != nil {
				return err
			}
		}
		if !report(id, e) {
			return errStopped
		}
		name, data = "", ""
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read the stream of events: %w", err)
	}
	return nil
}

func newEvent(id, name, data string) (*Event, error) {
	e := &Event{ID: id}
	var into any
	if name == "gap" {
		e.Gap = new(openapi.EventGap)
		into = e.Gap
	} else {
		e.Sandbox = new(openapi.SandboxEvent)
		into = e.Sandbox
	}
	if err := json.Unmarshal([]byte(data), into); err != nil {
		return nil, &Error{Status: http.StatusOK, Message: fmt.Sprintf("the event is not Berth's: %v", err)}
	}
	return e, nil
}
