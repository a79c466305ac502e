package rest

import (
	"maps"
	"net/http"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/credentials"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/egress/policy"
)

const (
	// maxRules bounds a list of a claim, as the schema of its record does.
	maxRules = 64
	// maxRuleBytes bounds what the rules of one sandbox take in its record, together with the lengths in the document.
	maxRuleBytes = 4 << 10
)

// noGateway says why the rules of a claim are refused.
const noGateway = "Use a NetworkPolicy in the namespace of the pool, or set spec.egress.mode of the pool to Gateway: " +
	"it has another mode, so nothing would enforce the field"

// network is what a call says that a sandbox may reach.
type network struct {
	rules core.EgressRules
	// sealHeaders returns rules.Headers for the sandbox with an ID. nil: there are none.
	sealHeaders func(id string) []byte
}

// size is what it takes in a record.
func (n *network) size() (size int) {
	for _, entry := range slices.Concat(n.rules.Allow, n.rules.Deny) {
		size += len(entry)
	}
	if n.sealHeaders != nil {
		size += len(n.sealHeaders("")) // it is the same for every ID
	}
	return size
}

// egressOf reads what a claim lets its sandbox reach. A pool that enforces no rules refuses a claim with some.
func (a *api) egressOf(request *openapi.NewSandbox) (n network, err error) {
	asked := deref(request.Network, openapi.NewSandboxNetwork{})
	var field string
	switch {
	case len(asked.AllowOut) > 0:
		field = "network.allowOut"
	case len(asked.DenyOut) > 0:
		field = "network.denyOut"
	case len(deref(asked.Rules, nil)) > 0:
		field = "network.rules"
	case !deref(request.AllowInternetAccess, true):
		field = "allow_internet_access"
	default:
		return n, nil
	}
	// A claim for a pool that does not exist is refused later, because of that.
	if pool, ok := a.Allocator.Pool(request.TemplateID); ok && pool.Spec.EgressEnabled() == nil {
		return n, notImplemented("%s: %s", field, noGateway)
	}
	return a.rulesOf("network.", asked.AllowOut, asked.DenyOut, deref(asked.Rules, nil), request.AllowInternetAccess)
}

// rulesOf checks the rules of one sandbox. An error names the fields with this prefix.
func (a *api) rulesOf(prefix string, allow, deny []string, rules openapi.NetworkRules, internet *bool) (n network, err error) {
	n.rules = core.EgressRules{Allow: slices.Concat(allow), Deny: slices.Concat(deny)} // nil if there is none
	if !deref(internet, true) && !slices.Contains(deny, policy.All) {
		n.rules.Deny = append(n.rules.Deny, policy.All)
	}
	if most := max(len(n.rules.Allow), len(n.rules.Deny)); most > maxRules { // the last one may be allow_internet_access
		return n, invalid("%sallowOut and %sdenyOut: %d entries in one list: at most %d, of which allow_internet_access "+
			"false takes one; use CIDRs or names like *.example.com", prefix, prefix, most, maxRules)
	}
	_, err = policy.Parse(policy.List{Field: prefix + "allowOut", Entries: n.rules.Allow},
		policy.List{Field: prefix + "denyOut", Entries: n.rules.Deny})
	if err != nil {
		return n, invalid("%v", err)
	}
	headers, err := headersOf(prefix+"rules", rules)
	switch {
	case err != nil:
		return n, err
	case len(headers) == 0:
	case a.sealer == nil:
		return n, notImplemented("%srules: headers need a key of the cluster; start the allocators with --access-key-file", prefix)
	default:
		n.sealHeaders = func(id string) []byte { return a.sealer.Seal(id, headers) }
	}
	if size := n.size(); size > maxRuleBytes {
		return n, invalid("%sallowOut, %sdenyOut and %srules: %d bytes: at most %d together; use CIDRs or names like *.example.com, "+
			"or put rules that many claims share into spec.egress of the pool", prefix, prefix, prefix, size, maxRuleBytes)
	}
	return n, nil
}

// headersOf reads the headers that the gateway sets, in one order. An error never has a value.
func headersOf(field string, rules openapi.NetworkRules) (headers []credentials.Header, err error) {
	dests := map[policy.Dest]string{}
	for _, written := range slices.Sorted(maps.Keys(rules)) {
		dest, err := policy.CredentialDest(written, policy.CredentialPort)
		if err != nil {
			return nil, invalid("%s: %v", field, err)
		}
		if before, twice := dests[dest]; twice {
			return nil, invalid("%s: %q and %q are the same host: leave one of them out", field, before, written)
		}
		dests[dest] = written
		names := map[string]bool{}
		for _, rule := range rules[written] {
			values := deref(rule.Transform, openapi.NetworkTransform{}).Headers
			for _, name := range slices.Sorted(maps.Keys(values)) {
				h := credentials.Header{Host: dest.Host, Port: dest.Port, Value: values[name]}
				if h.Name, err = policy.CredentialHeader(name); err == nil {
					err = policy.CheckHeaderValue(h.Value)
				}
				if err != nil {
					return nil, invalid("%s: host %q: header %q: %v", field, written, name, err)
				}
				if names[h.Name] {
					return nil, invalid("%s: host %q: header %q: it is there twice, and a request has it once", field, written, name)
				}
				names[h.Name] = true
				headers = append(headers, h)
			}
		}
	}
	return headers, nil
}

// headersShown returns what an answer says of the headers of a sandbox. No answer has a value.
func (a *api) headersShown(s *core.Sandbox) (shown []openapi.EgressHeader) {
	headers, err := a.sealer.Open(s.ID, s.Network.Headers)
	if err != nil {
		return nil // the gateway refuses the requests that may need them, and says so
	}
	for _, h := range headers {
		shown = append(shown, openapi.EgressHeader{Host: h.Host, Port: int(h.Port), Name: h.Name})
	}
	return shown
}

// setNetwork replaces what a sandbox may reach.
func (a *api) setNetwork(w *reply, r *http.Request) error {
	var request openapi.SandboxNetworkUpdate
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	n, err := a.rulesOf("", request.AllowOut, request.DenyOut, deref(request.Rules, nil), request.AllowInternetAccess)
	if err != nil {
		return err
	}
	id := r.PathValue("sandboxID")
	if n.sealHeaders != nil {
		n.rules.Headers = n.sealHeaders(id)
	}
	e, err := a.Allocator.SetNetwork(r.Context(), id, n.rules)
	if err == nil && e.Status == core.CallNotReady && e.Why != "" { // else it has not taken them
		pending := about(id, apierror.EgressPending, "the new rules hold, but a gateway may still use those of before; try again")
		return because(pending, e.Why)
	}
	if err == nil && e.Status == core.CallUnfit {
		return about(id, apierror.EgressMissing, "what leaves the pod of this sandbox does not go through an egress gateway, "+
			"so nothing would enforce the rules: use a NetworkPolicy in the namespace of its pool, or set spec.egress.mode "+
			"of the pool to Gateway and claim another sandbox")
	}
	return noContent(w, id, e.Status, err)
}
