package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// maxAuthority is a name with a dot at its end, a colon and a port.
const maxAuthority = maxName + 1 + 1 + 5

// Dest is where a request goes: a host name or an address, and a port. The zero value goes nowhere. Two requests for
// the same destination have equal values.
type Dest struct {
	// Host is the name in lower case, with A-labels, without a dot at its end. It is empty if the request names an
	// address. It must be looked up as an absolute name: search domains would make another one of it.
	Host string
	// Addr is the address that the request names. It is invalid if the request names a host. It has no zone and is
	// not IPv4-mapped.
	Addr netip.Addr
	Port uint16
}

// String returns the destination as an authority, from which Destination makes the same value.
func (d Dest) String() string {
	if d.Addr.IsValid() {
		return netip.AddrPortFrom(d.Addr, d.Port).String()
	}
	return d.Host + ":" + strconv.Itoa(int(d.Port))
}

// Destination reads the authority of a request: of CONNECT, with a defaultPort of 0, which makes the port required, or
// of a request in absolute form, with the port of its scheme. The error tells the client what to send instead.
//
// A name of one label and a name of the cluster are refused. An IPv4 address has four decimal numbers, and an IPv6
// address stands in brackets. Host is a part of authority if that is in lower case.
func Destination(authority string, defaultPort uint16) (Dest, error) {
	d, err := destination(authority, defaultPort)
	if err != nil {
		return Dest{}, fmt.Errorf("authority %s: %w", clip(authority), err)
	}
	return d, nil
}

func destination(authority string, defaultPort uint16) (d Dest, err error) {
	if len(authority) > maxAuthority {
		return d, fmt.Errorf("it is longer than %d bytes", maxAuthority)
	}
	for _, b := range []byte(authority) {
		if !inName(b) && !strings.ContainsRune(".:[]", rune(b)) {
			return d, badByte(b)
		}
	}
	host, port, found := strings.Cut(authority, ":")
	bracketed := strings.HasPrefix(authority, "[")
	if bracketed {
		var rest string
		if host, rest, found = strings.Cut(authority[1:], "]"); !found {
			return d, errors.New(`"]" is missing after the IPv6 address`)
		}
		if port, found = strings.CutPrefix(rest, ":"); !found && rest != "" {
			return d, errors.New(`only a colon and a port may follow "]"`)
		}
	}
	switch {
	case !bracketed && strings.ContainsRune(port, ':'):
		return d, errors.New("write an IPv6 address in brackets")
	case host == "":
		return d, errors.New("the host is missing")
	case !found && defaultPort == 0:
		return d, errors.New("the port is missing: write host:port")
	case !found:
		d.Port = defaultPort
	default:
		if d.Port, err = portNumber(port); err != nil {
			return d, err
		}
	}
	if !bracketed {
		if d.Host, err = hostName(host); err == nil {
			return d, nil
		}
	}
	addr, notAddr := netip.ParseAddr(host)
	switch {
	case !bracketed && notAddr != nil:
		return d, err
	case notAddr != nil || bracketed != addr.Is6():
		return d, errors.New("what stands in brackets is not an IPv6 address")
	case addr.Is4In6():
		return d, errMapped
	}
	d.Addr = addr
	return d, nil
}

var errMapped = errors.New("it is an IPv4-mapped IPv6 address: write the IPv4 address")

// portNumber reads a port in the one form that all programs read alike.
func portNumber(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || text[0] == '0' {
		return 0, fmt.Errorf("port %s is not a number from 1 to 65535 without leading zeros", clip(text))
	}
	return uint16(n), nil
}

// clip quotes a text for an error, or the first part of a long one.
func clip(text string) string {
	const most = 80
	if len(text) <= most {
		return strconv.Quote(text)
	}
	return strconv.Quote(text[:most]) + "..."
}
