// Package support writes what is needed to judge an installation from afar into one archive.
//
// The archive is a gzipped tar. Its directory has index.json, which lists every source with the size of its file or why it
// failed, and one file for each source: objects of the cluster, the state that the API shows, and of each of Berth's pods
// the logs, the metrics and, for gateways, the routes, the last uses and Envoy's configuration and statistics.
//
// # Guarantees
//
//   - Nothing in the cluster is changed.
//   - A source that fails, that is too slow or that is too large costs no other source. The index names it.
//   - The size of a file and of the archive is bounded.
//   - Secrets are listed without their data. Values of environment variables, of metadata that claimers wrote and of
//     annotations that are not Kubernetes' or Berth's own, and the commands of sandboxes, are removed. API keys, tokens,
//     private keys, signatures and every value of a Secret that can be read are removed wherever they stand. IDs of
//     sandboxes are shortened, as in logs.
//
// # What breaks them
//
// A secret that has none of these shapes and that a program has written into its log. So look through an archive before you
// give it to others.
package support
