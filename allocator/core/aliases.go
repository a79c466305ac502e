package core

import "github.com/berth-sandbox/berth/allocator/core/fact"

// Package fact says what these are, and has their functions.
type (
	PodKey         = fact.PodKey
	PoolKey        = fact.PoolKey
	Revision       = fact.Revision
	Fact           = fact.Fact
	SandboxFact    = fact.SandboxFact
	SessionFact    = fact.SessionFact
	RetirementFact = fact.RetirementFact
	SandboxID      = fact.SandboxID
	SessionID      = fact.SessionID
	Sandbox        = fact.Sandbox
	Binding        = fact.Binding
	Agent          = fact.Agent
	Access         = fact.Access
	Phase          = fact.Phase
	Cause          = fact.Cause
	Workload       = fact.Workload
	Resources      = fact.Resources
	Gateway        = fact.Gateway
	Declaration    = fact.Declaration
)

// The values of Phase and Access, and the bound of terms.
const (
	Starting     = fact.Starting
	Running      = fact.Running
	Releasing    = fact.Releasing
	Released     = fact.Released
	Ended        = fact.Ended
	AccessPublic = fact.AccessPublic
	AccessToken  = fact.AccessToken
	AccessTeam   = fact.AccessTeam
	MaxTerm      = fact.MaxTerm
)
