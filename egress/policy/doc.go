// Package policy decides what one sandbox may reach. It does no I/O and owns no clock: names are looked up by the
// caller, who asks again with the addresses.
//
// # What it decides
//
// [Destination] reads whom a request is for. [Policy.Decide] says whether that may be reached, and whether a name may
// be looked up. [Policy.Permits] says whether a connection to one address may be opened for it, or stay open.
//
// The rules are those of E2B's SDKs: a list of what is allowed and a list of what is denied. What neither list has is
// allowed, and allow beats deny. A pool and a claim each have rules, and both must allow a destination.
//
//	deny has     a name                               a literal address
//	nothing      allowed                              allowed
//	some CIDRs   by its addresses                     refused if they have it and no CIDR of allow has it
//	0.0.0.0/0    allowed if allow has it,             allowed if a CIDR of allow has it
//	             else refused and not looked up
//
// In both lists 0.0.0.0/0 means all traffic, IPv6 included. In allow it makes the deny list have no effect.
//
// # Guarantees
//
//   - A request has one destination, in one form. What some programs read as an address and others as a name is
//     neither: it is refused.
//   - A name that the rules cannot allow is Refused before it is looked up, because a look-up is a message to those
//     who serve the name.
//   - A name in allow is allowed at whatever public address it has. The deny list of the same rules does not change
//     that, and the deny list of the other rules does.
//   - No connection is permitted to an address that is not public, unless the operator counts its range as outside
//     (see [NewReach]). An address that contains another one, such as an IPv4-mapped one, is never permitted.
//   - What cannot be decided is refused: the zero values of [Verdict] and [Dest] are refusals.
//   - Rules and a Reach do not change once they are made, and contain no view into what they were made from. All
//     functions may be called by several goroutines.
//   - A decision allocates nothing. It takes time in proportion to the labels of a name, however many names the rules
//     have, and to the logarithm of the number of CIDRs.
//
// # What breaks them
//
//   - A caller that looks up a name before Decide has been asked, or with search domains. It must look up the name as
//     an absolute one.
//   - A caller that connects to another address than the one that it has asked Permits about.
//   - A Reach whose never lacks ranges of the cluster that are public addresses, or the network's own NAT64 prefix.
//
// # Limits
//
//   - 256 entries in each list, 1,024 bytes in each entry.
//   - Only the entry 0.0.0.0/0 ends look-ups. A deny list of two halves of the address space refuses as much and looks
//     up names first.
//   - Once all traffic is denied, a CIDR in allow does not allow the names that have an address in it, because they
//     would have to be looked up first. At E2B it does.
//   - An allowed name may be an alias, and its owner decides where it leads. An allowed wildcard allows look-ups of
//     whatever is below it, which its owner can read.
package policy
