// Package webhooks sends the events of the log to the URLs that teams have registered. A [Manager] belongs to one term of one leader.
// EventWebhook objects have the webhooks, with the position up to which each has its events.
//
// # States of a webhook
//
//	disabled   nothing is sent; events meanwhile are passed over
//	healthy    up to 4 deliveries are under way, of different sandboxes
//	failing    the last delivery failed; one at a time is tried, after a pause of 1 s that doubles up to 5 min
//	locked     its secret cannot be opened with the key of this cluster; nothing is sent
//
// A delivery that failed is tried again after a pause of its own, 1 s doubled up to 5 min. It is given up after 8 attempts
// if another delivery of the webhook has succeeded meanwhile: then the event, and not the target, is what fails.
//
// # Guarantees
//
//   - Every event that a webhook selects is delivered at least once, unless it is given up or has left the log. In the latter
//     case the webhook gets one event of the type berth.events.gap with the number of events that it may lack.
//   - The events of one sandbox are delivered in their order: the next one is sent when the one before is delivered or given up.
//   - A target delays no other webhook, and neither the log nor the core: each webhook has one delivery of its own, and 28
//     more are shared. At most 128 are under way.
//   - A request is signed, or it is not sent. It goes to an address that [Guard] has checked as it was dialled. Redirects are not
//     followed, and at most 4 KiB of an answer are read, and thrown away.
//   - Positions are stored every 2 s. After the end of a leader the deliveries since then come again, and those that were
//     delivered behind one that was not.
//
// # What breaks them
//
// A target whose address is allowed and that answers 2xx without having kept the event.
package webhooks
