// Package accounts knows the users of a sandbox: for whom the agent may act, and as whom it runs things
// when a call names no user.
//
// # Two kinds of agents
//
//   - One that may change its user and groups (it has CAP_SETUID and CAP_SETGID, as root has in most
//     pods) acts for every account of the image. Commands run as [DefaultName] unless a call asks for
//     another user. If there is no such account and the agent is process 1, it makes one. Elsewhere the
//     files may be those of a machine, and commands run as the agent's own user then.
//   - Any other acts as the user of the pod only, and refuses every other name with a sentence that says
//     so. The name [DefaultName] means the agent's own user where no account has that name and none is made,
//     because programs that were written for E2B use it.
//
// # Guarantees
//
//   - A name that is no account, or that this agent may not act for, is a [*UnknownError]. No call falls
//     back to another user than the one it names.
//   - An account is looked up anew for each call. Accounts that the sandbox adds are known at once.
package accounts

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// DefaultName is the user that E2B's sandboxes have.
const DefaultName = "user"

// Account is a user of the sandbox.
type Account struct {
	Name     string
	UID, GID uint32
	// Groups are the supplementary groups.
	Groups []uint32
	Home   string
	// Switched: this is not the user of the agent's own process.
	Switched bool
}

// Credential returns what a process of this account is started with: nil if it is the agent's own.
func (a *Account) Credential() *syscall.Credential {
	if !a.Switched {
		return nil
	}
	return &syscall.Credential{Uid: a.UID, Gid: a.GID, Groups: a.Groups}
}

// UnknownError is the error of a name for which the agent cannot act.
type UnknownError struct{ message string }

func (e *UnknownError) Error() string { return e.message }

// Directory finds accounts. Its methods may be called concurrently.
type Directory struct {
	own      Account
	switches bool
	// fallback runs what names no user.
	fallback string
}

// New returns the accounts of this process's root file system. If mayAdd, it makes the account
// DefaultName where there is none. The error says why it could not; the Directory works then too, and
// what names no user runs as the agent's own user.
func New(mayAdd bool) (*Directory, error) {
	d := &Directory{own: own(), switches: maySwitch()}
	d.fallback = d.own.Name
	if !d.switches {
		return d, nil
	}
	_, err := user.Lookup(DefaultName)
	if errors.As(err, new(user.UnknownUserError)) || errors.Is(err, fs.ErrNotExist) {
		if !mayAdd {
			return d, nil
		}
		err = addDefault("/")
	}
	if err != nil {
		return d, fmt.Errorf("account %q: %w", DefaultName, err)
	}
	d.fallback = DefaultName
	return d, nil
}

// Own returns the account of the agent's process.
func (d *Directory) Own() Account { return d.own }

// Default returns the name of the account that runs what names no user.
func (d *Directory) Default() string { return d.fallback }

// Lookup returns the account of this name. An error that is not a *UnknownError says that the accounts
// could not be read.
func (d *Directory) Lookup(name string) (Account, error) {
	if name == d.own.Name {
		return d.own, nil
	}
	u, err := user.Lookup(name)
	var unknown user.UnknownUserError
	switch {
	case errors.As(err, &unknown), errors.Is(err, fs.ErrNotExist):
		if name == DefaultName && d.fallback == d.own.Name {
			return d.own, nil
		}
		return Account{}, &UnknownError{fmt.Sprintf("the sandbox has no user %q", name)}
	case err != nil:
		return Account{}, fmt.Errorf("user %q: %w", name, err)
	}
	a, err := account(u)
	if err != nil {
		return Account{}, err
	}
	if a.UID == d.own.UID {
		return d.own, nil
	}
	if !d.switches {
		return Account{}, &UnknownError{fmt.Sprintf(
			"this sandbox runs everything as its own user %q: its agent may not act as %q", d.own.Name, name)}
	}
	a.Switched = true
	return a, nil
}

func account(u *user.User) (Account, error) {
	uid, err := id(u.Uid)
	if err != nil {
		return Account{}, fmt.Errorf("user %q: %w", u.Username, err)
	}
	gid, err := id(u.Gid)
	if err != nil {
		return Account{}, fmt.Errorf("user %q: %w", u.Username, err)
	}
	a := Account{Name: u.Username, UID: uid, GID: gid, Home: u.HomeDir}
	groups, err := u.GroupIds()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Account{}, fmt.Errorf("groups of user %q: %w", u.Username, err)
	}
	for _, g := range groups {
		gid, err := id(g)
		if err != nil {
			return Account{}, fmt.Errorf("groups of user %q: %w", u.Username, err)
		}
		a.Groups = append(a.Groups, gid)
	}
	return a, nil
}

func id(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	return uint32(n), err
}

// own returns the account of this process. An image need not have an entry for it.
func own() Account {
	uid := os.Getuid()
	a := Account{Name: strconv.Itoa(uid), UID: uint32(uid), GID: uint32(os.Getgid()), Home: os.Getenv("HOME")}
	if u, err := user.LookupId(a.Name); err == nil && u.Uid == a.Name {
		a.Name = u.Username
		if a.Home == "" {
			a.Home = u.HomeDir
		}
	}
	if a.Home == "" {
		a.Home = "/"
	}
	groups, _ := os.Getgroups()
	for _, g := range groups {
		a.Groups = append(a.Groups, uint32(g))
	}
	return a
}

// maySwitch reports whether this process may change its user and its groups.
func maySwitch() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false
	}
	const wanted = 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID
	return data[0].Effective&wanted == wanted
}

// addDefault makes the account DefaultName with a group of that name and a home directory, in the files
// below root. It takes the first number from 1000 that is no user and no group.
func addDefault(root string) error {
	passwd, err := readIfThere(filepath.Join(root, "etc/passwd"))
	if err != nil {
		return err
	}
	group, err := readIfThere(filepath.Join(root, "etc/group"))
	if err != nil {
		return err
	}
	number := 1000
	for taken(passwd, number) || taken(group, number) {
		number++
	}
	shell := "/bin/sh"
	if _, err := os.Stat(filepath.Join(root, "bin/bash")); err == nil {
		shell = "/bin/bash"
	}
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		return err
	}
	home := "/home/" + DefaultName
	if err := os.MkdirAll(filepath.Join(root, home), 0o755); err != nil {
		return err
	}
	if err := os.Chown(filepath.Join(root, home), number, number); err != nil {
		return err
	}
	// The password is none and cannot be entered. The account comes last: it must not be seen half made.
	if err := addLine(filepath.Join(root, "etc/group"), 0o644, fmt.Sprintf("%s:x:%d:", DefaultName, number)); err != nil {
		return err
	}
	shadow := filepath.Join(root, "etc/shadow")
	if _, err := os.Stat(shadow); err == nil {
		if err := addLine(shadow, 0o640, DefaultName+":*:20000:0:99999:7:::"); err != nil {
			return err
		}
	}
	return addLine(filepath.Join(root, "etc/passwd"), 0o644,
		fmt.Sprintf("%s:x:%d:%d::%s:%s", DefaultName, number, number, home, shell))
}

// taken reports whether a line of /etc/passwd or /etc/group has this number in its third field.
func taken(file string, number int) bool {
	for line := range strings.Lines(file) {
		if f := strings.Split(line, ":"); len(f) > 2 && strings.TrimSpace(f[2]) == strconv.Itoa(number) {
			return true
		}
	}
	return false
}

// readIfThere returns the contents of a file, "" if there is none.
func readIfThere(path string) (string, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(text), err
}

// addLine writes a line to the end of a file in one write.
func addLine(path string, mode fs.FileMode, line string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	last := make([]byte, 1)
	if end, err := f.Seek(0, io.SeekEnd); err != nil {
		return err
	} else if end > 0 {
		if _, err := f.ReadAt(last, end-1); err != nil {
			return err
		}
		if last[0] != '\n' {
			line = "\n" + line
		}
	}
	_, err = f.WriteString(line + "\n")
	return errors.Join(err, f.Close())
}

// Named returns the name of the user in the header Authorization of a call, "" if there is none. E2B's
// SDKs send it as Basic, with an empty password.
func Named(header http.Header) (string, error) {
	r := http.Request{Header: header}
	if len(header.Values("Authorization")) == 0 {
		return "", nil
	}
	name, _, ok := r.BasicAuth()
	if !ok {
		return "", &UnknownError{"the header Authorization must be \"Basic\", with the name of a user"}
	}
	return name, nil
}
