package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// platform is what depends on an image's architecture.
type platform struct {
	machine elf.Machine
	// directories are where distributions keep shared libraries and their dynamic
	// loaders look without a cache file.
	directories []string
}

func platformOf(arch string) (platform, error) {
	in := func(multiarch string) []string {
		return []string{"/lib/" + multiarch, "/usr/lib/" + multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib"}
	}
	switch arch {
	case "amd64":
		return platform{elf.EM_X86_64, in("x86_64-linux-gnu")}, nil
	case "arm64":
		return platform{elf.EM_AARCH64, in("aarch64-linux-gnu")}, nil
	}
	return platform{}, fmt.Errorf("architecture %q: must be amd64 or arm64", arch)
}

// object is an ELF file: a program, a dynamic loader or a shared library.
type object struct {
	from, to    string // its path on this machine, and the one in the image
	content     []byte
	class       elf.Class
	machine     elf.Machine
	interpreter string   // path of the dynamic loader; empty: static, or a library
	needed      []string // names of the shared libraries that it names itself
	searches    []string // where it wants them looked for first
}

func readObject(from, to string) (object, error) {
	content, err := os.ReadFile(from)
	if err != nil {
		return object{}, err
	}
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return object{}, fmt.Errorf("%s is no ELF file: %w", from, err)
	}
	o := object{from: from, to: to, content: content, class: f.Class, machine: f.Machine}
	for _, p := range f.Progs {
		switch p.Type {
		case elf.PT_INTERP:
			raw := make([]byte, p.Filesz)
			if _, err := p.ReadAt(raw, 0); err != nil {
				return object{}, fmt.Errorf("%s: read its interpreter: %w", from, err)
			}
			o.interpreter = strings.TrimRight(string(raw), "\x00")
		case elf.PT_DYNAMIC:
			if f.SectionByType(elf.SHT_DYNAMIC) == nil {
				return object{}, fmt.Errorf("%s: cannot tell which libraries it needs: it has no section headers", from)
			}
		}
	}
	if o.needed, err = f.DynString(elf.DT_NEEDED); err != nil {
		return object{}, fmt.Errorf("%s: read which libraries it needs: %w", from, err)
	}
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} { // RPATH counts only without RUNPATH, see ld.so(8)
		values, err := f.DynString(tag)
		if err != nil {
			return object{}, fmt.Errorf("%s: read where it looks for libraries: %w", from, err)
		}
		if len(values) > 0 {
			o.searches = strings.Split(values[0], ":")
			break
		}
	}
	return o, nil
}

// closure returns the dynamic loader of a program and every shared library that
// it needs, directly or not, each with the path in the image at which the kernel
// or the loader will look for it. For a static program it returns nothing.
//
// It reads what the files say, as the loader would, and runs none of them. A
// library that a program opens by name while it runs is not found this way.
func closure(program object, directories []string) ([]object, error) {
	if program.interpreter == "" {
		return nil, nil
	}
	// On most systems /lib64 and the loader in it are symbolic links. The image
	// has a file at exactly the path that the program names.
	loader, err := readObject(program.interpreter, program.interpreter)
	if err != nil {
		return nil, fmt.Errorf("dynamic loader of %s: %w", program.from, err)
	}
	found := []object{loader}
	// Libraries name the loader too; it never looks for itself.
	seen := map[string]bool{path.Base(program.interpreter): true}
	for queue := []object{program}; len(queue) > 0; queue = queue[1:] {
		for _, name := range queue[0].needed {
			if seen[name] {
				continue
			}
			seen[name] = true
			library, err := find(name, queue[0], directories)
			if err != nil {
				return nil, err
			}
			found, queue = append(found, library), append(queue, library)
		}
	}
	return found, nil
}

// find looks for the library in the places that the loader tries for a library
// that is needed by the object.
func find(name string, by object, directories []string) (object, error) {
	type place struct{ from, to string }
	var places []place
	switch {
	case path.IsAbs(name):
		places = []place{{name, name}}
	case strings.Contains(name, "/"):
		return object{}, fmt.Errorf("%s needs %s, which depends on the working directory", by.from, name)
	default:
		for _, dir := range by.searches {
			from, to := expand(dir, by.from), expand(dir, by.to)
			if path.IsAbs(from) {
				places = append(places, place{path.Join(from, name), path.Join(to, name)})
			}
		}
		for _, dir := range directories {
			// The image has no symbolic links between directories, and loaders are
			// built to look in the real ones.
			if real, err := filepath.EvalSymlinks(dir); err == nil {
				places = append(places, place{path.Join(real, name), path.Join(real, name)})
			}
		}
	}
	for _, p := range places {
		library, err := readObject(p.from, p.to)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return object{}, fmt.Errorf("%s needs %s: %w", by.from, name, err)
		// Else another architecture's: the loader goes on too.
		case library.class == by.class && library.machine == by.machine:
			return library, nil
		}
	}
	return object{}, fmt.Errorf("%s needs %s, which is in none of the places where libraries are looked for", by.from,
		name)
}

// expand replaces $ORIGIN, the directory of the object itself, in a place to look
// for libraries. Other variables are left, and so is a relative path.
func expand(dir, object string) string {
	origin := path.Dir(object)
	return strings.NewReplacer("$ORIGIN", origin, "${ORIGIN}", origin).Replace(dir)
}
