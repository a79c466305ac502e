package rest

import (
	"net/http"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/egress/policy"
)

const (
	// maxRules bounds a list of a claim, as the schema of its record does.
	maxRules = 64
	// maxRuleBytes bounds what the rules of one sandbox take in its record, together with the lengths in the document.
	maxRuleBytes = 4 << 10
	// allTraffic is the entry that stands for everything.
	allTraffic = "0.0.0.0/0"
)

// noGateway says why the rules of a claim are refused.
const noGateway = "Use a NetworkPolicy in the namespace of the pool, or set spec.egress.mode of the pool to Gateway: " +
	"it has another mode, so nothing would enforce the field"

// egressOf reads what a claim lets its sandbox reach. A pool that enforces no rules refuses a claim with some.
func (a *api) egressOf(request *openapi.NewSandbox) (core.EgressRules, error) {
	network := deref(request.Network, openapi.NewSandboxNetwork{})
	var field string
	switch {
	case len(network.AllowOut) > 0:
		field = "network.allowOut"
	case len(network.DenyOut) > 0:
		field = "network.denyOut"
	case !deref(request.AllowInternetAccess, true):
		field = "allow_internet_access"
	default:
		return core.EgressRules{}, nil
	}
	if pool, ok := a.Allocator.Pool(request.TemplateID); !ok || pool.Spec.EgressEnabled() == nil {
		return core.EgressRules{}, notImplemented("%s: %s", field, noGateway)
	}
	return rulesOf("network.", network.AllowOut, network.DenyOut, request.AllowInternetAccess)
}

// rulesOf checks the rules of one sandbox. An error names the fields with this prefix.
func rulesOf(prefix string, allow, deny []string, internet *bool) (core.EgressRules, error) {
	rules := core.EgressRules{Allow: slices.Concat(allow), Deny: slices.Concat(deny)} // nil if there is none
	if !deref(internet, true) && !slices.Contains(deny, allTraffic) {
		rules.Deny = append(rules.Deny, allTraffic)
	}
	if n := max(len(rules.Allow), len(rules.Deny)); n > maxRules { // the last one may be allow_internet_access
		return rules, invalid("%sallowOut and %sdenyOut: %d entries in one list: at most %d, of which allow_internet_access "+
			"false takes one; use CIDRs or names like *.example.com", prefix, prefix, n, maxRules)
	}
	if size := ruleBytes(rules); size > maxRuleBytes {
		return rules, invalid("%sallowOut and %sdenyOut: %d bytes: at most %d together; use CIDRs or names like *.example.com, "+
			"or put rules that many claims share into spec.egress of the pool", prefix, prefix, size, maxRuleBytes)
	}
	_, err := policy.Parse(policy.List{Field: prefix + "allowOut", Entries: rules.Allow},
		policy.List{Field: prefix + "denyOut", Entries: rules.Deny})
	if err != nil {
		return rules, invalid("%v", err)
	}
	return rules, nil
}

// ruleBytes is what rules take in a record.
func ruleBytes(rules core.EgressRules) (size int) {
	for _, entry := range slices.Concat(rules.Allow, rules.Deny) {
		size += len(entry)
	}
	return size
}

// setNetwork replaces what a sandbox may reach.
func (a *api) setNetwork(w *reply, r *http.Request) error {
	var request openapi.SandboxNetworkUpdate
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	rules, err := rulesOf("", request.AllowOut, request.DenyOut, request.AllowInternetAccess)
	if err != nil {
		return err
	}
	id := r.PathValue("sandboxID")
	e, err := a.Allocator.SetNetwork(r.Context(), id, rules)
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
