package process

import "time"

// SetKillWait replaces killWait. Call it before the service serves.
func (s *Service) SetKillWait(limit time.Duration) { s.killWait = limit }
