package access

import (
	"context"
	"fmt"
)

// Role is what a caller may do. A role may do everything that the roles below it may do. The zero
// Role may do nothing.
type Role string

// The roles.
const (
	// Admin may make every call, for the sandboxes of every team.
	Admin Role = "admin"
	// Member may claim, read, change and release the sandboxes of its team, and read pools.
	Member Role = "member"
	// ReadOnly may read the sandboxes of its team, and pools.
	ReadOnly Role = "read-only"
)

// rank orders the roles.
func (r Role) rank() int {
	switch r {
	case Admin:
		return 3
	case Member:
		return 2
	case ReadOnly:
		return 1
	}
	return 0
}

// May reports whether the role r may make a call that needs a role.
func (r Role) May(needed Role) bool {
	return r.rank() > 0 && needed.rank() > 0 && r.rank() >= needed.rank()
}

// ParseRole returns the role of a name.
func ParseRole(name string) (Role, error) {
	if r := Role(name); r.rank() > 0 {
		return r, nil
	}
	return "", fmt.Errorf("role %q: must be %s, %s or %s", name, Admin, Member, ReadOnly)
}

// Caller is who makes a call. The zero Caller may do nothing.
type Caller struct {
	// Key is the name of the API key, "" for an API without keys.
	Key string
	// Team owns the sandboxes that the caller claims, "" for an API without keys.
	Team string
	Role Role
}

// Sees reports whether the caller may know that a team's sandboxes exist.
func (c Caller) Sees(team string) bool { return c.Role == Admin || c.Role.rank() > 0 && c.Team == team }

type callerKey struct{}

// With returns a context of a call by c.
func With(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// From returns the caller of a call, the zero Caller for a context without one.
func From(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}
