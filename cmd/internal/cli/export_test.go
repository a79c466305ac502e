package cli

// ServeOn is Listen on a listener that is there already.
var ServeOn = serveOn

// The deadlines.
const (
	HeaderWait = headerWait
	ReadWait   = readWait
	WriteWait  = writeWait
	IdleWait   = idleWait
)
