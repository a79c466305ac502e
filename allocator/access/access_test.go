package access

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEachRoleMayDoWhatLowerRolesMay(t *testing.T) {
	for role, may := range map[Role][]Role{
		Admin: {Admin, Member, ReadOnly}, Member: {Member, ReadOnly}, ReadOnly: {ReadOnly}, "": nil, "root": nil,
	} {
		for _, needed := range []Role{Admin, Member, ReadOnly, "", "root"} {
			require.Equal(t, slices.Contains(may, needed), role.May(needed), "%q for a call that needs %q", role, needed)
		}
	}
}

func TestOnlyAdminsSeeSandboxesOfOtherTeams(t *testing.T) {
	require.True(t, Caller{Role: Admin, Team: "a"}.Sees("b"))
	for _, role := range []Role{Member, ReadOnly} {
		require.True(t, Caller{Role: role, Team: "a"}.Sees("a"))
		require.False(t, Caller{Role: role, Team: "a"}.Sees("b"))
		require.False(t, Caller{Role: role, Team: "a"}.Sees(""))
	}
	require.False(t, Caller{}.Sees(""), "the zero Caller sees nothing")
}

func TestContextWithoutCallerMayDoNothing(t *testing.T) {
	require.Equal(t, Caller{}, From(context.Background()))
	c := Caller{Key: "ci", Team: "a", Role: Member}
	require.Equal(t, c, From(With(context.Background(), c)))
}
