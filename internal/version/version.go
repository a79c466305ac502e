// Package version holds the version of Berth. Nothing else in the tree states it, except the
// chart, which a test compares with it.
package version

// Number is the version of the next release, or of this one if the tree is tagged.
const Number = "0.2.0"
