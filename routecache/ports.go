package routecache

import (
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
)

// Ports is the set of ports of a sandbox that requests may reach. The zero value allows
// every port. Two sets of the same ports are equal by ==.
type Ports struct {
	// Big-endian and ascending, two bytes each. A string, unlike a slice, keeps Route
	// comparable.
	packed string
}

// NewPorts returns the set of these ports. They may come in any order and repeat. An
// empty list allows every port. Port 0 is kept although no request can be for it,
// because the set {0} must not become the set of all ports.
func NewPorts(ports []uint16) Ports {
	sorted := slices.Clone(ports)
	slices.Sort(sorted)
	packed := make([]byte, 0, 2*len(sorted))
	for _, p := range slices.Compact(sorted) {
		packed = binary.BigEndian.AppendUint16(packed, p)
	}
	return Ports{string(packed)}
}

// Allows reports whether requests may reach port. It does not allocate.
func (p Ports) Allows(port uint16) bool {
	return p.packed == "" || p.Has(port)
}

// Has reports whether port is listed in the set. It does not allocate.
func (p Ports) Has(port uint16) bool {
	for i := 0; i < len(p.packed); i += 2 {
		if p.at(i) == port {
			return true
		}
	}
	return false
}

// List returns the ports in ascending order, or nil if every port is allowed.
func (p Ports) List() []uint16 {
	var all []uint16
	for i := 0; i < len(p.packed); i += 2 {
		all = append(all, p.at(i))
	}
	return all
}

// at returns the port whose first byte is at index i.
func (p Ports) at(i int) uint16 { return uint16(p.packed[i])<<8 | uint16(p.packed[i+1]) }

// String returns "all" or a list such as "80, 8080".
func (p Ports) String() string {
	if p.packed == "" {
		return "all"
	}
	var names []string
	for _, port := range p.List() {
		names = append(names, strconv.Itoa(int(port)))
	}
	return strings.Join(names, ", ")
}
