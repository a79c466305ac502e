package cli

// ServeOn is Listen on a listener that is there already.
var ServeOn = serveOn

// The deadlines.
const (
	HeaderTimeout = headerTimeout
	ReadTimeout   = readTimeout
	WriteTimeout  = writeTimeout
	IdleTimeout   = idleTimeout
)
