package docs

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestInvariantsPageIsTheGoldenFile(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	text, err := Invariants(root)
	require.NoError(t, err)
	Section(t, "docs/invariants.md", "invariants", text)
}

func TestInvariantLineStandsDirectlyAboveATest(t *testing.T) {
	found, err := testsOf("p/p_test.go", []byte("package p\n\n// It does.\n//\n// Invariant: I1, P2\n"+
		"func TestIt(t *testing.T) {}\n\nfunc TestOther(t *testing.T) {}\n"))
	require.NoError(t, err)
	require.Equal(t, []reference{{Group: "p", Name: "TestIt", IDs: []string{"I1", "P2"}}}, found)

	for _, source := range []string{
		"package p\n\n// Invariant: I1\nfunc helper() {}\n",
		"package p\n\n// Invariant: I1\n\nfunc TestIt(t *testing.T) {}\n",
		"package p\n\n// Invariant: I1\n// More.\nfunc TestIt(t *testing.T) {}\n",
	} {
		_, err := testsOf("p/p_test.go", []byte(source))
		require.ErrorContains(t, err, "p/p_test.go: a line \"// Invariant: ...\" is not directly above a test")
	}
}

func TestInvariantsWithoutTestAndUnknownIDsAreReported(t *testing.T) {
	all := []invariant{
		{ID: "I1", Title: "t", Statement: "s", Why: "w"}, {ID: "I2", Title: "t", Statement: "s", Why: "w"}, {ID: "I2"},
	}
	err := checkInvariants(all,
		[]reference{{Group: "p", Name: "TestA", IDs: []string{"I1", "I7"}}},
		[]reference{{Group: "b.yaml", Name: "b", IDs: []string{"README"}}})
	for _, want := range []string{
		"I2 has no test", `"I2" needs an id of its own, title`,
		`TestA names the invariant "I7"`, `b names the invariant "README"`,
	} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "I1 has no test")
}
