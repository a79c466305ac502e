// Package charts tests the Helm chart in charts/berth: what it renders, what it
// refuses, what a real API server says to it, and what the accounts that it makes
// may do. The tests need helm ($HELM, else the one on PATH, else the one that
// tools/helm.mod pins, which takes a minute or two to build the first time) and
// skip under -short.
package charts
