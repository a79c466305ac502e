// Package docs writes the generated parts of the documentation: the references of flags,
// metrics, errors and custom resources, and the page on the invariants.
//
// Each part is written by a test whose name ends in GoldenFile. The test stands where its
// source can be read: the flags of a program in the program's package, for example. With
// the flag -update the test writes the part ("make golden"); without it the test fails if
// the part is stale.
//
// Other tests here compare the pages with the tree: the files, declarations, tests, make
// targets and links that they name, and the overview's tables of folders and imports.
package docs
