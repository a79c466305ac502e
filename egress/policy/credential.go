package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// CredentialPort is the port of a credential that names none.
const CredentialPort = 443

const (
	maxHeaderName  = 128
	maxHeaderValue = 4 << 10
)

// CredentialDest returns the host and the port that a credential is for, of a text host or host:port. Only an exact
// name can have one: the certificate of the host must be valid for it, and a name below a wildcard may be that of
// another owner.
func CredentialDest(text string, defaultPort uint16) (Dest, error) {
	d, err := credentialDest(text, defaultPort)
	if err != nil {
		return Dest{}, fmt.Errorf("host %s: %w", clip(text), err)
	}
	return d, nil
}

func credentialDest(text string, defaultPort uint16) (d Dest, err error) {
	host, port, named := strings.Cut(text, ":")
	if strings.Contains(host, "*") {
		return d, errors.New("a credential is for one host: write a name without a wildcard")
	}
	if d.Host, err = unicodeName(host); err != nil {
		return d, err
	}
	if d.Port = defaultPort; named {
		if d.Port, err = portNumber(port); err != nil {
			return d, err
		}
	}
	if d.Port == 80 {
		return d, errors.New("port 80: the gateway speaks TLS to the host, so name the port for that")
	}
	return d, nil
}

// unsettable are headers that say where a message goes or where it ends.
var unsettable = []string{
	"host", "connection", "keep-alive", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "expect",
	"http2-settings",
}

// forProxies reports whether proxies read a header. Envoy removes these, in every spelling that programs take for the
// same name: any character that is no letter or digit stands for "-".
func forProxies(name string) bool {
	rest, is := strings.CutPrefix(name, "proxy")
	if !is && len(name) > 2 && name[0] == 'x' && !alphanumeric(rune(name[1])) {
		for _, word := range []string{"berth", "envoy", "forwarded"} {
			if rest, is = strings.CutPrefix(name[2:], word); is {
				break
			}
		}
	}
	return is && (rest == "" || !alphanumeric(rune(rest[0])))
}

func alphanumeric(r rune) bool { return 'a' <= r && r <= 'z' || '0' <= r && r <= '9' }

// CredentialHeader returns the name of a header that a gateway may set, in lower case.
func CredentialHeader(text string) (string, error) {
	const others = `!#$%&'*+-.^_|~` + "`"
	name := strings.ToLower(text)
	switch {
	case name == "" || len(name) > maxHeaderName:
		return "", fmt.Errorf("header %s: must have 1 to %d characters", clip(text), maxHeaderName)
	case strings.ContainsFunc(name, func(r rune) bool {
		return !alphanumeric(r) && !strings.ContainsRune(others, r)
	}):
		return "", fmt.Errorf("header %s: a name has letters, digits and %s only", clip(text), others)
	case slices.Contains(unsettable, name) || forProxies(name):
		return "", fmt.Errorf("header %s: proxies read it, so a gateway does not set it", clip(text))
	}
	return name, nil
}

// CheckHeaderValue returns an error that says why a gateway cannot send a value. It does not have the value.
func CheckHeaderValue(value string) error {
	switch {
	case value == "" || len(value) > maxHeaderValue:
		return fmt.Errorf("a value of %d bytes: must have 1 to %d", len(value), maxHeaderValue)
	case strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r > '~' }):
		return errors.New("the value has a character that is not printable ASCII: a line end, for example")
	case strings.Trim(value, " \t") != value:
		return errors.New("the value begins or ends with a space")
	}
	return nil
}
