package rest

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

// accessOf reads who may send requests to a sandbox of a pool, and how Envoy sends them.
func (a *api) accessOf(request *openapi.NewSandbox, b *core.Binding) error {
	network := deref(request.Network, openapi.NewSandboxNetwork{})
	public := network.AllowPublicTraffic
	least := core.AccessPublic
	if public != nil && !*public {
		least = core.AccessToken
	}
	field, asked := "network.allowPublicTraffic", public != nil
	if b.Access = least; request.Access != nil {
		b.Access, _ = fact.AccessOf(string(*request.Access)) // one of the schema's words
		field, asked = "access", true
		if b.Access < least || public != nil && *public && b.Access != core.AccessPublic {
			return invalid("access: %v contradicts network.allowPublicTraffic %v; leave one of them out", b.Access, *public)
		}
	}
	floor := core.AccessPublic
	if pool, ok := a.Allocator.Pool(request.TemplateID); ok {
		floor, _ = fact.AccessOf(string(pool.Spec.Access))
	}
	// "Not public" is satisfied by every pool that is not public.
	if asked && b.Access < floor && (request.Access != nil || least == core.AccessPublic) {
		return invalid("%s: the access of the pool is %v, and a claim may only ask for a stricter one; leave it out", field, floor)
	}
	if max(b.Access, floor) != core.AccessPublic && a.AccessKey == nil {
		return notImplemented("access: %v needs a key of the cluster; start the allocators with --access-key-file", max(b.Access, floor))
	}
	if b.MaskHost = deref(network.MaskRequestHost, ""); b.MaskHost != "" && !validMask(b.MaskHost) {
		return invalid("network.maskRequestHost: %q: must be a host with an optional port of 1 to 65535, such as localhost:${PORT}", b.MaskHost)
	}
	for _, port := range network.HTTPSPorts {
		b.HTTPSPorts = append(b.HTTPSPorts, uint16(port))
	}
	slices.Sort(b.HTTPSPorts)
	b.HTTPSPorts = slices.Compact(b.HTTPSPorts)
	return nil
}

// maskedHost matches a host name or an address, with an optional port.
var maskedHost = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?$`)

// validMask reports whether a mask is a host for every port.
func validMask(mask string) bool {
	longest := strings.ReplaceAll(mask, "${PORT}", "65535")
	parts := maskedHost.FindStringSubmatch(longest)
	if len(longest) > 253 || parts == nil {
		return false
	}
	port, err := strconv.ParseUint(cmp.Or(parts[3], "1"), 10, 16)
	return err == nil && port != 0
}

// withCredentials adds to an answer what opens a sandbox that is not public, and its agent. A caller that may only
// read gets none, because requests can change a sandbox.
func (a *api) withCredentials(ctx context.Context, shown openapi.Sandbox, s *core.Sandbox) openapi.Sandbox {
	needed := s.Access != core.AccessPublic || s.Agent.Port != 0 && !s.Agent.Public
	if !needed || a.AccessKey == nil || !access.From(ctx).Role.May(access.Member) {
		return shown
	}
	if s.Access == core.AccessToken {
		token := a.AccessKey.Token(s.ID)
		shown.TrafficAccessToken = &token
	}
	agent := a.AccessKey.Secret(s.ID).AgentToken(s.ID)
	shown.EnvdAccessToken = &agent
	return shown
}

// networkOf returns what an answer says of the network of a sandbox, nil if nothing was asked for.
func (a *api) networkOf(s *core.Sandbox) *openapi.SandboxNetwork {
	if s.Access == core.AccessPublic && s.MaskHost == "" && s.HTTPSPorts == nil && s.Network.Equal(core.EgressRules{}) {
		return nil
	}
	shown := openapi.SandboxNetwork{
		AllowPublicTraffic: s.Access == core.AccessPublic, MaskRequestHost: s.MaskHost,
		AllowOut: s.Network.Allow, DenyOut: s.Network.Deny, Headers: a.headersShown(s),
	}
	for _, port := range s.HTTPSPorts {
		shown.HTTPSPorts = append(shown.HTTPSPorts, int(port))
	}
	return &shown
}

// defaultLink is how long a link is valid if the call does not say.
const defaultLink = time.Hour

// makeLink answers with a URL that opens a port of a sandbox in a browser.
func (a *api) makeLink(w *reply, r *http.Request) error {
	var request openapi.NewLink
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	s, err := a.live(r)
	if err != nil {
		return err
	}
	port, path := uint16(deref(request.Port, int64(s.DefaultPort))), deref(request.Path, "/")
	if port == 0 {
		return invalid("port: the sandbox has no default port any more, because its pool is gone; name one")
	}
	if err := sandboxaccess.CheckPath(path); err != nil {
		return invalid("path: %v", err)
	}
	link := openapi.Link{URL: fmt.Sprintf("%s://%d-%s.%s", a.PublicScheme, port, s.ID, a.PublicHost)}
	switch {
	case s.Access == core.AccessPublic: // its address is enough
		link.URL += path
	case a.AccessKey == nil:
		return notImplemented("the allocators have no key for links; start them with --access-key-file")
	default:
		expires := time.Now().Add(secondsOf(deref(request.ExpiresIn, int64(defaultLink.Seconds())))).Truncate(time.Second)
		link.ExpiresAt = &expires
		link.URL += a.AccessKey.Secret(s.ID).Link(s.ID, port, expires, path)
	}
	return writeJSON(w, http.StatusCreated, link)
}
