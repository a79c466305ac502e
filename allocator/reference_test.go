package allocator

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/tools/docs"
)

func TestReasonReferenceIsTheGoldenFile(t *testing.T) {
	table := "| reason | when | what to do |\n|---|---|---|\n"
	for _, r := range fact.Reasons {
		table += fmt.Sprintf("| `%s` | %s | %s |\n", r.Reason, r.When, r.Next)
	}
	docs.Section(t, "docs/reference/reasons.md", "reasons", table)
}

// refusals has every core.Refusal by its name, and what the answer depends on.
var refusals = map[string][]core.ClaimRefused{
	"NoPool":        {{Why: core.NoPool}},
	"PoolEmpty":     {{Why: core.PoolEmpty}},
	"TooMany":       {{Why: step.TooMany}},
	"LineFull":      {{Why: core.LineFull}},
	"NotAccepted":   {{Why: core.NotAccepted}},
	"OverLimit":     {{Why: core.OverLimit}, {Why: core.OverLimit, Excess: teams.Excess{Limit: teams.ClaimsPerSecond}}},
	"KeyReused":     {{Why: core.KeyReused}},
	"KeyEnded":      {{Why: core.KeyEnded}},
	"Overloaded":    {{Why: core.Overloaded}},
	"Quarantined":   {{Why: core.Quarantined}},
	"Ending":        {{Why: core.Ending}},
	"StartFailed":   {{Why: core.StartFailed}},
	"NotConfigured": {{Why: core.NotConfigured}, {Why: core.NotConfigured, Sandbox: starting("python", "a")}},
}

func TestTableOfRefusalsIsTheGoldenFile(t *testing.T) {
	answer := func(r apierror.Reason) string {
		for _, k := range apierror.Kinds() {
			if k.Reason == r {
				return fmt.Sprintf("%d `%s`", k.Code, r)
			}
		}
		t.Fatalf("no kind has the reason %s", r)
		return ""
	}
	table := "| of a | reason | when | answer to the caller |\n|---|---|---|---|\n"
	found := 0
	constants := docs.Constants(t, "allocator/core/step")
	for _, c := range constants {
		if c.Type != "Refusal" {
			continue
		}
		require.Contains(t, refusals, c.Name)
		var answers []string
		for _, e := range refusals[c.Name] {
			answers = append(answers, answer(refused("python", core.Claim{}, e).Reason))
		}
		table += fmt.Sprintf("| claim | `%s` | %s | %s |\n", c.Name, c.Text, strings.Join(answers, " or "))
		found++
	}
	require.Len(t, refusals, found)
	for _, reason := range core.PodReasons {
		i := slices.IndexFunc(constants, func(c docs.Constant) bool { return c.Value == reason && strings.HasPrefix(c.Name, "Pod") })
		require.GreaterOrEqual(t, i, 0, reason)
		table += fmt.Sprintf("| pod | `%s` | %s | %s, if a claim waits for a pod in vain |\n", reason, constants[i].Text, answer(apierror.PoolEmpty))
	}
	table += fmt.Sprintf("| sandbox | each word of the table above | as it says there | %s; %s to a claim that was not answered yet |\n",
		answer(apierror.SandboxGone), answer(apierror.StartFailed))
	docs.Section(t, "docs/reference/reasons.md", "refusals", table)
}
