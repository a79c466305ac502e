package controlclient

// Connected reports whether there is a stream whose snapshot was applied.
func (c *Client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current != nil
}
