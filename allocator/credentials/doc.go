// Package credentials has the values of the headers that egress gateways set on requests of sandboxes.
//
// The headers of a claim are in the record and in the object of its sandbox. A [Sealer] seals them with a key that is
// derived from the key of the cluster, for the sandbox that has the ID. What it has sealed for one sandbox it opens for no
// other one. The core and the API server see only what is sealed.
//
// The values of pools are in Secrets of type berth.sh/egress-credential in the namespace of the API keys. [Values] watches
// them. A pool names a Secret and a key of it.
//
// # Guarantees
//
//   - No value is in clear in a record, an object, a log, a metric or an answer of the API.
//   - A value counts as soon as the watch has delivered it. While the API server is away the last ones stay valid.
//   - A value that cannot be read or sent is not known. A request that needs it is refused, and never goes without it.
//
// # What breaks them
//
// A right to create Secrets in that namespace, or pools, is the right to have the gateway send a value to a host of one's
// choice. The type of the Secret says that it may be sent: no other Secret can be named. Values of claims are lost with the
// key of the cluster.
package credentials
