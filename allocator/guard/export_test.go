package guard

// Sizes are those of the tables.
type Sizes struct{ Sandboxes, Pods, Unfenced, Retired, Sessions, Streams int }

// Sizes returns them.
func (g *Guard) Sizes() Sizes {
	return Sizes{len(g.sandboxes), len(g.pods), len(g.unfenced), len(g.retired), len(g.sessions), len(g.streams)}
}
