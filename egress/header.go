package egress

import (
	"net/http"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress/policy"
)

// Header is a header that the gateway sets on plain requests to one host. They go out with TLS.
type Header struct {
	// Host is the name as in policy.Dest, and Port that of TLS.
	Host string
	Port uint16
	// Name is in lower case.
	Name string
	// Value is the value. Without it, it is the one that SetCredentials has under the name Credential. A header without a
	// value has every request refused that needs it.
	Value, Credential string
}

// SetCredentials replaces the values that headers name; nil: they are not known. Requests that the origin has already
// got are not touched.
func (s *Server) SetCredentials(values map[string]string) {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	s.credentials = values
}

// withHeaders returns where a plain request goes that gets headers, and whether it gets some. One without a port goes
// to that of TLS, as programs write http for the URL of the gateway's side.
func (e *entry) withHeaders(q *question, dest policy.Dest) (policy.Dest, bool) {
	if q.method == http.MethodConnect || dest.Host == "" {
		return dest, false
	}
	secure := dest
	if secure.Port == 80 {
		secure.Port = policy.CredentialPort
	}
	for i := range e.Headers {
		if h := &e.Headers[i]; h.Host == secure.Host && h.Port == secure.Port {
			return secure, true
		}
	}
	return dest, e.HeadersUnknown
}

// headersFor returns what a request to a destination gets. The caller has the lock of the table.
func (s *Server) headersFor(e *entry, dest policy.Dest) ([]Header, *apierror.Error) {
	missing := apierror.New(apierror.EgressNoCredential,
		"the gateway does not know a header that requests to %s need", dest.Host)
	if e.HeadersUnknown {
		return nil, missing
	}
	var set []Header
	for _, h := range e.Headers {
		if h.Host != dest.Host || h.Port != dest.Port {
			continue
		}
		if h.Value == "" {
			h.Value = s.credentials[h.Credential]
		}
		for i := range set { // the last one of a name counts
			if set[i].Name == h.Name {
				set[i] = set[len(set)-1]
				set = set[:len(set)-1]
				break
			}
		}
		set = append(set, h)
	}
	for _, h := range set {
		if h.Value == "" || h.Name == "" {
			return nil, missing
		}
	}
	return set, nil
}
