package api_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

var update = flag.Bool("update", false, "write the golden file anew")

const golden = "testdata/messages.golden"

// Replicas and routers of two versions talk to each other during a rollout and a
// rollback, and a journal is read by the version before the one that wrote it. So
// messages are only ever added to: a line of the golden file stays for good.
func TestGoldenFileOfMessagesIsOnlyAddedTo(t *testing.T) {
	lines := append(describe(controlv1.File_api_control_v1_control_proto), describe(journalv1.File_api_journal_v1_journal_proto)...)
	raw, err := os.ReadFile(golden)
	if !*update {
		require.NoError(t, err)
	}
	was := strings.Split(strings.TrimSpace(string(raw)), "\n")
	for _, line := range was {
		if line != "" && !slices.Contains(lines, line) && !reserved(line) {
			t.Errorf("taken away or changed, and versions that are in use rely on it: %s", line)
		}
	}
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(golden, []byte(strings.Join(lines, "\n")+"\n"), 0o644))
		return
	}
	for _, line := range lines {
		if !slices.Contains(was, line) {
			t.Errorf("new, run make golden: %s", line)
		}
	}
}

// reserved reports whether a line is a field of the control protocol that was taken away
// in order: its number and its name are reserved, so that no later field gets another
// meaning in an earlier version.
func reserved(line string) bool {
	parts := strings.Fields(line) // message, number, cardinality, kind, name
	if len(parts) != 5 {
		return false
	}
	m := controlv1.File_api_control_v1_control_proto.Messages().ByName(protoreflect.FullName(parts[0]).Name())
	number, err := strconv.Atoi(parts[1])
	return m != nil && m.FullName() == protoreflect.FullName(parts[0]) && err == nil &&
		m.ReservedRanges().Has(protoreflect.FieldNumber(number)) && m.ReservedNames().Has(protoreflect.Name(parts[4]))
}

// describe says how each field of a file's messages is encoded, and the numbers of
// its enums.
func describe(file protoreflect.FileDescriptor) (lines []string) {
	var messages func(protoreflect.MessageDescriptors)
	messages = func(all protoreflect.MessageDescriptors) {
		for i := range all.Len() {
			m := all.Get(i)
			for j := range m.Fields().Len() {
				f := m.Fields().Get(j)
				kind := f.Kind().String()
				if f.Message() != nil {
					kind = string(f.Message().FullName())
				}
				if f.Enum() != nil {
					kind = string(f.Enum().FullName())
				}
				lines = append(lines, fmt.Sprintf("%s %d %s %s %s", m.FullName(), f.Number(), f.Cardinality(), kind, f.Name()))
			}
			messages(m.Messages())
		}
	}
	messages(file.Messages())
	for i := range file.Enums().Len() {
		e := file.Enums().Get(i)
		for j := range e.Values().Len() {
			lines = append(lines, fmt.Sprintf("%s %d %s", e.FullName(), e.Values().Get(j).Number(), e.Values().Get(j).Name()))
		}
	}
	for i := range file.Services().Len() {
		s := file.Services().Get(i)
		for j := range s.Methods().Len() {
			m := s.Methods().Get(j)
			lines = append(lines, fmt.Sprintf("%s %s -> %s", m.FullName(), m.Input().FullName(), m.Output().FullName()))
		}
	}
	slices.Sort(lines)
	return lines
}
