package main

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/journal"
)

// dumped is a slot of the journal.
type dumped struct {
	Position uint64           `json:"position"`
	Term     uint64           `json:"term"`
	Journal  string           `json:"journal,omitempty"`
	Slot     int              `json:"slot"`
	Format   int              `json:"format"`
	Bytes    int              `json:"bytes"`
	Error    string           `json:"error,omitempty"`
	Records  []map[string]any `json:"records"`
}

// dumpedRecord is a row of the table: a record, or a slot that is damaged or has none.
type dumpedRecord struct {
	slot   dumped
	record map[string]any
}

var dumpedRecords = view[dumpedRecord]{
	name: func(r dumpedRecord) string { return text(r.record["key"]) },
	columns: []column[dumpedRecord]{
		{name: "POSITION", text: func(r dumpedRecord) string { return fmt.Sprint(r.slot.Position) }},
		{name: "TERM", text: func(r dumpedRecord) string { return fmt.Sprint(r.slot.Term) }},
		{name: "SLOT", wide: true, text: func(r dumpedRecord) string { return fmt.Sprint(r.slot.Slot) }},
		{name: "REVISION", wide: true, text: func(r dumpedRecord) string {
			return text(r.record["term"]) + "." + text(r.record["counter"])
		}},
		{name: "KEY", text: func(r dumpedRecord) string { return text(r.record["key"]) }},
		{name: "STATE", text: func(r dumpedRecord) string {
			if r.slot.Error != "" {
				return "ERROR " + r.slot.Error
			}
			for _, kind := range []string{"sandbox", "retirement", "session"} {
				if state, ok := r.record[kind].(map[string]any); ok {
					return pairs(state)
				}
			}
			return ""
		}},
	},
}

func pairs(state map[string]any) string {
	all := make([]string, 0, len(state))
	for _, name := range slices.Sorted(maps.Keys(state)) {
		all = append(all, name+"="+text(state[name]))
	}
	return strings.Join(all, " ")
}

// text is a value of JSON on one line.
func text(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return v
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// Run implements the command.
func (c *journalDumpCommand) Run(ctx context.Context, o *output) error {
	clients, err := c.clients()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	batches, damage := journal.Dump(ctx, &journal.Objects{Client: clients.Berth, Namespace: c.Namespace})
	if len(batches) == 0 && damage == nil {
		damage = fmt.Errorf("there is no journal in namespace %s; -n names another", c.Namespace)
	}
	slots, rows, err := dump(batches, c.Key)
	if err != nil {
		return err
	}
	for _, slot := range slots {
		if slot.Error != "" {
			damage = errors.Join(damage, fmt.Errorf("slot %d: %s", slot.Slot, slot.Error))
		}
	}
	if len(batches) == 0 {
		return damage
	}
	return errors.Join(show(o, c.formatFlags, dumpedRecords, rows, slots), damage)
}

// dump returns the slots that were written, and their records whose keys begin with key.
func dump(batches []journal.Batch, key string) (slots []dumped, rows []dumpedRecord, err error) {
	slots = []dumped{}
	for _, b := range batches {
		if b.Position == 0 && b.Err == nil {
			continue
		}
		slot := dumped{
			Position: b.Position, Term: b.Term, Journal: b.Journal, Slot: b.Index, Format: b.Format, Bytes: len(b.Data),
			Records: []map[string]any{},
		}
		if b.Err != nil {
			slot.Error = b.Err.Error()
			rows = append(rows, dumpedRecord{slot: slot})
		}
		for _, r := range b.Records {
			if !strings.HasPrefix(r.GetKey(), key) {
				continue
			}
			record, err := readable(r)
			if err != nil {
				return nil, nil, fmt.Errorf("record %s: %w", r.GetKey(), err)
			}
			slot.Records = append(slot.Records, record)
			rows = append(rows, dumpedRecord{slot, record})
		}
		if len(slot.Records) > 0 || key == "" || b.Err != nil {
			slots = append(slots, slot)
		}
	}
	return slots, rows, nil
}

// readable is the JSON of a record with addresses, moments and durations that a person can read.
func readable(r proto.Message) (record map[string]any, err error) {
	raw, err := protojson.Marshal(r)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(raw, &record); err != nil {
		return nil, err
	}
	return record, read(record)
}

// read replaces the values of an object in place.
func read(object map[string]any) error {
	for name, v := range object {
		switch v := v.(type) {
		case map[string]any:
			if name == "metadata" { // its keys are the caller's
				continue
			}
			if err := read(v); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		case []any:
			for i := range v {
				if one, ok := v[i].(string); ok {
					value, err := readValue(name, one)
					if err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					v[i] = value
				}
			}
		case string:
			value, err := readValue(name, v)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			object[name] = value
		}
	}
	return nil
}

func readValue(name, v string) (any, error) {
	switch name {
	case "podIp", "podIps":
		raw, err := base64.StdEncoding.DecodeString(v)
		if err != nil {
			return nil, err
		}
		address, ok := netip.AddrFromSlice(raw)
		if !ok {
			return nil, fmt.Errorf("%q is no address", v)
		}
		return address.String(), nil
	case "requestHash":
		raw, err := base64.StdEncoding.DecodeString(v)
		return hex.EncodeToString(raw), err
	case "claimedAt", "startedAt", "endAt", "releasedAt", "lifetimeEnd", "startBy", "asleepAt", "at":
		n, err := strconv.ParseInt(v, 10, 64)
		return time.UnixMicro(n).UTC().Format(time.RFC3339Nano), err
	case "idleTimeout", "lifetime", "stopAfter":
		n, err := strconv.ParseInt(v, 10, 64)
		return (time.Duration(n) * time.Microsecond).String(), err
	case "term", "counter", "minBytesPerMinute":
		return strconv.ParseUint(v, 10, 64)
	case "phase":
		return strings.ToLower(strings.TrimPrefix(v, "PHASE_")), nil
	}
	return v, nil
}
