package fact_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// Records of every version name pods by this text, and the podUID of an object cannot be changed.
func TestRecordsNamePodsByUIDAndLife(t *testing.T) {
	for id, key := range map[string]fact.PodKey{
		"u": {UID: "u"}, "u/0": {UID: "u", Life: 1}, "u/7": {UID: "u", Life: 8}, "": {}, "/0": {Life: 1},
		"u/": {UID: "u/"}, "u/x": {UID: "u/x"}, "u/-1": {UID: "u/-1"}, "u/01": {UID: "u/01"}, "u/1/2": {UID: "u/1", Life: 3},
	} {
		require.Equal(t, key, fact.PodKeyOf("", "", id), id)
		require.Equal(t, id, key.ID())
	}
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.String().Draw(t, "id")
		require.Equal(t, id, fact.PodKeyOf("ns", "name", id).ID())
	})
}

func TestLivesOfOnePodAreOrderedByNumber(t *testing.T) {
	at := func(life int) fact.PodKey { return fact.PodKey{UID: "u", Life: life} }
	require.Negative(t, fact.ComparePods(at(2), at(10)))
	require.Zero(t, fact.ComparePods(at(2).Whole(), at(10).Whole()))
	require.Positive(t, fact.ComparePods(fact.PodKey{UID: "v"}, at(10)))
}
