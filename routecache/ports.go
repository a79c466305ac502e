package routecache

import (
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
)

// Ports are the ports of a sandbox that may be reached. The zero value is all of
// them. Two that hold the same ports are equal by ==, however they were made.
type Ports struct {
	// Big-endian and ascending, two bytes each: a slice would make routes
	// impossible to compare.
	packed string
}

// NewPorts returns the set of these ports, which may come in any order and more
// than once; none at all: every port. 0 is kept, though no request is for it: a
// set of nothing else must not become all.
func NewPorts(ports []uint16) Ports {
	sorted := slices.Clone(ports)
	slices.Sort(sorted)
	packed := make([]byte, 0, 2*len(sorted))
	for _, p := range slices.Compact(sorted) {
		packed = binary.BigEndian.AppendUint16(packed, p)
	}
	return Ports{string(packed)}
}

// Allows reports whether port may be reached. It does not allocate.
func (p Ports) Allows(port uint16) bool {
	if p.packed == "" {
		return true
	}
	for i := 0; i < len(p.packed); i += 2 {
		if p.at(i) == port {
			return true
		}
	}
	return false
}

// List returns the ports, ascending, and nil if all may be reached.
func (p Ports) List() []uint16 {
	var all []uint16
	for i := 0; i < len(p.packed); i += 2 {
		all = append(all, p.at(i))
	}
	return all
}

// at returns the port that begins at the byte i.
func (p Ports) at(i int) uint16 { return uint16(p.packed[i])<<8 | uint16(p.packed[i+1]) }

// String returns "all", or the ports as in "80, 8080".
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
