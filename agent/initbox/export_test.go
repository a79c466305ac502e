package initbox

// SealRaw seals an order that SealOrder would not.
func (p *Peer) SealRaw(text []byte) []byte { return seal(text, &p.orders) }
