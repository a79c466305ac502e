package core

import (
	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Package fact says what these are, and has their functions.
type (
	PodKey           = fact.PodKey
	PoolKey          = fact.PoolKey
	Revision         = fact.Revision
	Fact             = fact.Fact
	SandboxFact      = fact.SandboxFact
	SessionFact      = fact.SessionFact
	RetirementFact   = fact.RetirementFact
	SandboxID        = fact.SandboxID
	SessionID        = fact.SessionID
	Sandbox          = fact.Sandbox
	Binding          = fact.Binding
	Agent            = fact.Agent
	SleepPolicy      = fact.SleepPolicy
	EgressRules      = fact.EgressRules
	PoolEgress       = fact.PoolEgress
	EgressCredential = fact.EgressCredential
	Access           = fact.Access
	Phase            = fact.Phase
	Cause            = fact.Cause
	Workload         = fact.Workload
	Resources        = fact.Resources
	Gateway          = fact.Gateway
	Declaration      = fact.Declaration
)

// The values of Phase and Access, and the bound of terms.
const (
	Starting      = fact.Starting
	Running       = fact.Running
	FallingAsleep = fact.FallingAsleep
	Asleep        = fact.Asleep
	Waking        = fact.Waking
	Stopped       = fact.Stopped
	Releasing     = fact.Releasing
	Released      = fact.Released
	Ended         = fact.Ended
	AccessPublic  = fact.AccessPublic
	AccessToken   = fact.AccessToken
	AccessTeam    = fact.AccessTeam
	MaxTerm       = fact.MaxTerm
)

// Packages sandboxes and claims say what these are.
type (
	Mark       = sandboxes.Mark
	Order      = sandboxes.Order
	TeamUse    = claims.Use
	SleepAsk   = claims.SleepAsk
	TeamStatus = claims.TeamStatus
)

// The values of Order.
const (
	OldestFirst = sandboxes.OldestFirst
	NewestFirst = sandboxes.NewestFirst
)

// Package step says what these are.
type (
	Instant             = step.Instant
	Pool                = step.Pool
	Pod                 = step.Pod
	Values              = step.Values
	Scope               = step.Scope
	Selection           = step.Selection
	BusyProbe           = step.BusyProbe
	Activity            = step.Activity
	Question            = step.Question
	Counts              = step.Counts
	PodFailure          = step.PodFailure
	Stuck               = step.Stuck
	Trouble             = step.Trouble
	End                 = step.End
	Effect              = step.Effect
	Refusal             = step.Refusal
	CallStatus          = step.CallStatus
	CreatePod           = step.CreatePod
	Write               = step.Write
	Settle              = step.Settle
	DeletePod           = step.DeletePod
	RecyclePod          = step.RecyclePod
	SyncPod             = step.SyncPod
	LabelPod            = step.LabelPod
	ResizePod           = step.ResizePod
	Configure           = step.Configure
	StartSandbox        = step.StartSandbox
	Freeze              = step.Freeze
	WriteArchive        = step.WriteArchive
	DropArchive         = step.DropArchive
	Thaw                = step.Thaw
	SendClose           = step.SendClose
	SandboxAsleep       = step.SandboxAsleep
	SandboxAwake        = step.SandboxAwake
	SandboxStopped      = step.SandboxStopped
	WriteObject         = step.WriteObject
	ReadLog             = step.ReadLog
	DeleteObject        = step.DeleteObject
	IdlePodFailed       = step.IdlePodFailed
	RecycleEnded        = step.RecycleEnded
	PoolDrained         = step.PoolDrained
	Claimed             = step.Claimed
	BatchClaimed        = step.BatchClaimed
	ClaimGranted        = step.ClaimGranted
	ClaimCanceled       = step.ClaimCanceled
	ClaimRefused        = step.ClaimRefused
	ReleaseAnswered     = step.ReleaseAnswered
	SandboxCallAnswered = step.SandboxCallAnswered
	WouldReap           = step.WouldReap
	DeadDeclared        = step.DeadDeclared
	SessionDeclaredDead = step.SessionDeclaredDead
	SendSnapshot        = step.SendSnapshot
	SendRoute           = step.SendRoute
	SendRelease         = step.SendRelease
	SendResolved        = step.SendResolved
	SendQuiesce         = step.SendQuiesce
	SendProbe           = step.SendProbe
	SendResume          = step.SendResume
	SendPong            = step.SendPong
	CloseStream         = step.CloseStream
	SandboxCreated      = step.SandboxCreated
	SandboxReady        = step.SandboxReady
	SandboxReleased     = step.SandboxReleased
	Acknowledged        = step.Acknowledged
	Repaired            = step.Repaired
)

// The values of the types of package step.
const (
	PodUnschedulable = step.PodUnschedulable
	PodImagePull     = step.PodImagePull
	PodNotStarted    = step.PodNotStarted
	PodCrashLoop     = step.PodCrashLoop
	PodOOMKilled     = step.PodOOMKilled
	PodFailed        = step.PodFailed
	PodEvicted       = step.PodEvicted
	PodPreempted     = step.PodPreempted
	PodNodeLost      = step.PodNodeLost
	PodDeleted       = step.PodDeleted
	PodNeverReady    = step.PodNeverReady
	Recycled         = step.Recycled
	NotNeeded        = step.NotNeeded
	NotFit           = step.NotFit
	NotProven        = step.NotProven
	NoPool           = step.NoPool
	PoolEmpty        = step.PoolEmpty
	KeyReused        = step.KeyReused
	KeyEnded         = step.KeyEnded
	Overloaded       = step.Overloaded
	StartFailed      = step.StartFailed
	Ending           = step.Ending
	Quarantined      = step.Quarantined
	LineFull         = step.LineFull
	OverLimit        = step.OverLimit
	NotConfigured    = step.NotConfigured
	NotAccepted      = step.NotAccepted
	CallUnknown      = step.CallUnknown
	CallGone         = step.CallGone
	CallOK           = step.CallOK
	CallAsleep       = step.CallAsleep
	CallNotReady     = step.CallNotReady
	CallRefused      = step.CallRefused
	CallUnfit        = step.CallUnfit
	DeclareUnknown   = step.DeclareUnknown
	DeclareConnected = step.DeclareConnected
	DeclareHeard     = step.DeclareHeard
	DeclareOK        = step.DeclareOK
)

// PodReasons are those of a PodFailure.
var PodReasons = step.PodReasons
