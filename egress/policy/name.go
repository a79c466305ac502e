package policy

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

const (
	maxName  = 253 // bytes, without the dot at the end: RFC 1035, section 2.3.4
	maxLabel = 63
)

// clusterDomain is where Kubernetes puts the names of services and pods, unless a cluster is configured otherwise.
const clusterDomain = ".cluster.local"

// hostName returns the normal form of a host name: lower case, without a dot at its end. The text has at least two
// labels of letters, digits, "-" and "_".
func hostName(text string) (string, error) {
	for _, b := range []byte(text) { // before lower case, which makes ASCII of some other characters
		if !inName(b) && b != '.' {
			return "", badByte(b)
		}
	}
	name := strings.ToLower(strings.TrimSuffix(text, "."))
	if len(name) > maxName {
		return "", fmt.Errorf("the name is longer than %d bytes", maxName)
	}
	labels, last := 0, ""
	for label := range strings.SplitSeq(name, ".") {
		switch {
		case label == "":
			return "", errors.New("a label is empty: write one dot between labels")
		case len(label) > maxLabel:
			return "", fmt.Errorf("a label is longer than %d bytes", maxLabel)
		case label[0] == '-' || label[len(label)-1] == '-':
			return "", fmt.Errorf(`the label %q begins or ends with "-"`, label)
		}
		labels, last = labels+1, label
	}
	switch {
	case numeric(last):
		return "", errors.New("some programs read it as an IPv4 address: " +
			"write an address as four decimal numbers from 0 to 255, without leading zeros and without a dot at the end")
	case labels < 2:
		return "", errors.New("the name has one label, which only search domains could resolve: write the full name")
	case strings.HasSuffix("."+name, clusterDomain):
		// The answer to a look-up would tell which services exist.
		return "", errors.New("names of the cluster are not outside it")
	}
	return name, nil
}

// unicodeName is hostName for a name that people write: it may be in Unicode.
func unicodeName(text string) (string, error) {
	if ascii(text) {
		return hostName(text)
	}
	if !utf8.ValidString(text) {
		return "", errors.New("it is not valid UTF-8: write its A-labels (xn--...)")
	}
	name, err := idna.Lookup.ToASCII(text)
	if err != nil {
		return "", fmt.Errorf("no domain name has this form (%w): write its A-labels (xn--...)", err)
	}
	return hostName(name)
}

// inName reports whether a label may have the byte. Names of services have "_", and hosts in the field have it too.
func inName(b byte) bool {
	return 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || '0' <= b && b <= '9' || b == '-' || b == '_'
}

// badByte says what is wrong with a byte that no name has.
func badByte(b byte) error {
	if b >= 0x80 {
		return errors.New("a character is not ASCII: write the name with A-labels (xn--...)")
	}
	return fmt.Errorf("a host has no %q: write a name or an address only", rune(b))
}

func ascii(text string) bool {
	for _, b := range []byte(text) {
		if b >= 0x80 {
			return false
		}
	}
	return true
}

// numeric reports whether a host whose last label this is must be an IPv4 address (WHATWG URL, "ends in a number
// checker"). inet_aton reads "0x" as 0.
func numeric(label string) bool {
	digits := "0123456789"
	if hex, ok := strings.CutPrefix(label, "0x"); ok {
		label, digits = hex, "0123456789abcdef"
	}
	return strings.Trim(label, digits) == ""
}
