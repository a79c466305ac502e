package files

import (
	"path"
	"strings"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// Lengths in bytes above which the kernel refuses a path and a name in it.
const (
	maxPath = 4095
	maxName = 255
)

// Resolve returns the absolute, clean path that a path of Write means for an account. Symbolic links are not followed.
func Resolve(path string, account accounts.Account) (string, error) {
	name, err := resolve(path, &account, "")
	return name, coded(err)
}

// resolve returns the absolute, clean path that text means for an account. "~" is the account's home.
// Relative paths, the empty one included, begin at dir, or at the home if dir is empty. Symbolic links
// are left to the kernel. Errors are InvalidArgument.
func resolve(text string, account *accounts.Account, dir string) (string, error) {
	switch {
	case text == "~" || strings.HasPrefix(text, "~/"):
		text = account.Home + text[1:]
	case strings.HasPrefix(text, "~"):
		user, _, _ := strings.Cut(text[1:], "/")
		return "", invalid("path %.100q: only ~ and ~/ are known; name user %.40q in the call instead", text, user)
	case !strings.HasPrefix(text, "/"):
		if dir == "" {
			dir = account.Home
		}
		text = dir + "/" + text
	}
	// The home and dir are part of it by now: nothing else checks them.
	if strings.IndexByte(text, 0) >= 0 {
		return "", invalid("the path has a NUL byte")
	}
	// A relative home or directory must not depend on where the agent was started.
	text = path.Clean("/" + text)
	if len(text) > maxPath {
		return "", invalid("the path has %d bytes: at most %d are possible", len(text), maxPath)
	}
	for name := range strings.SplitSeq(text, "/") {
		if len(name) > maxName {
			return "", invalid("a name in the path has %d bytes: at most %d are possible", len(name), maxName)
		}
	}
	return text, nil
}

func invalid(format string, a ...any) error {
	return problem(connect.CodeInvalidArgument, format, a...)
}
