package controlclient

import (
	"context"
	"maps"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
)

// dispatchEgress puts a message into effect at an egress router. Questions about the use of sandboxes and API keys are
// not for it.
func (s *stream) dispatchEgress(_ context.Context, m *controlv1.AllocatorMessage) error {
	sandboxes, sequence := s.client.o.Egress, m.GetSequence()
	switch m := m.GetMessage().(type) {
	case *controlv1.AllocatorMessage_Snapshot:
		s.rules = append(s.rules, m.Snapshot.GetRoutes()...)
		if !m.Snapshot.GetLast() {
			return nil
		}
		if err := sandboxes.Replace(s.rules); err != nil {
			return err
		}
		s.join(len(s.rules))
		s.rules = nil
	case *controlv1.AllocatorMessage_Route:
		return sandboxes.Set(m.Route)
	case *controlv1.AllocatorMessage_Release:
		for _, id := range m.Release.GetSandboxIds() {
			sandboxes.Forget(id)
		}
	case *controlv1.AllocatorMessage_Resolved:
		id := m.Resolved.GetSandboxId()
		if sequence != 0 { // a close
			sandboxes.Forget(id)
			return nil
		}
		defer sandboxes.Answered(id)
		if r := m.Resolved.GetRoute(); r != nil {
			return sandboxes.Set(r)
		}
	case *controlv1.AllocatorMessage_Credentials:
		s.applyCredentials(m.Credentials)
	case *controlv1.AllocatorMessage_AskEgressUsage:
		usage := sandboxes.Usage(m.AskEgressUsage.GetSandboxId())
		usage.Number = m.AskEgressUsage.GetNumber()
		s.enqueue(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_EgressUsage{EgressUsage: usage}})
	case *controlv1.AllocatorMessage_Pong:
		s.applyPong(m.Pong)
	}
	return nil
}

// applyCredentials collects one part of the values of headers, and replaces them after the last.
func (s *stream) applyCredentials(m *controlv1.Credentials) {
	maps.Copy(s.credentials, m.GetValues())
	switch {
	case m.GetUnread():
		s.client.o.Egress.SetCredentials(nil)
	case !m.GetLast():
		return
	default:
		s.client.o.Egress.SetCredentials(s.credentials)
	}
	s.hasSecrets = true
	s.credentials = map[string]string{}
}
