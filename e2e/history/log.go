package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// Log is a history that is being written, in memory and to a file. Its methods may be
// called concurrently.
type Log struct {
	name string

	mu     sync.Mutex
	file   *os.File
	out    *bufio.Writer
	events []Event
	err    error
}

// Create begins a history in a file. first is of kind Run.
func Create(name string, first Event) (*Log, error) {
	file, err := os.Create(name)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	l := &Log{name: name, file: file, out: bufio.NewWriter(file)}
	l.Add(first)
	return l, nil
}

// Name is the name of the file.
func (l *Log) Name() string { return l.name }

// Add writes one event and returns it. Flush returns the error, if there is one.
func (l *Log) Add(e Event) Event {
	line, err := json.Marshal(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
	if err == nil {
		_, err = l.out.Write(append(line, '\n'))
	}
	l.err = errors.Join(l.err, err)
	return e
}

// All returns the events so far. The caller must not change them.
func (l *Log) All() []Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.events[:len(l.events):len(l.events)]
}

// Flush writes buffered events to the file. It returns all errors since Create.
func (l *Log) Flush() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = errors.Join(l.err, l.out.Flush())
	return l.err
}

// Close flushes and closes the file.
func (l *Log) Close() error { return errors.Join(l.Flush(), l.file.Close()) }

// longestLine bounds a line of a history, in bytes.
const longestLine = 1 << 20

// ParseEvents parses a history. It fails if a line is no event or the first one is no Run.
func ParseEvents(r io.Reader) ([]Event, error) {
	var all []Event
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("history: line %d: %w", len(all)+1, err)
		}
		all = append(all, e)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("history: after line %d: %w", len(all), err)
	}
	if len(all) == 0 || all[0].Kind != Run || all[0].Settings == nil {
		return nil, errors.New("history: the first line is not the event of a run")
	}
	return all, nil
}

// Open reads the history in a file.
func Open(name string) (*History, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	defer file.Close()
	events, err := ParseEvents(file)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, name)
	}
	return New(events), nil
}
