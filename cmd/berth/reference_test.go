package main

import (
	"testing"

	"github.com/berth-sandbox/berth/tools/docs"
)

func TestFlagReferenceIsTheGoldenFile(t *testing.T) {
	docs.Section(t, "docs/reference/flags.md", "berth", docs.Flags(t, new(commands), "berth", ""))
}
