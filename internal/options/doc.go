// Package options checks the Options structs that constructors take.
//
// Each constructor of a long-lived part takes one struct and returns an error for
// each required field that is not set. All such errors have one form, so that a
// reader of a log finds the field at once:
//
//	journal.Options.Store is required
package options
