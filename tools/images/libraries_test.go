package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeELF is as much of an ELF file as says what it needs: it cannot run.
type fakeELF struct {
	interpreter string
	needed      []string
	runpath     string
	rpath       string
	machine     elf.Machine // 0: x86-64
	noSections  bool
}

func (f fakeELF) bytes() []byte {
	if f.machine == 0 {
		f.machine = elf.EM_X86_64
	}
	const headers, program, section = 64, 56, 64 // sizes of the file's header and of a table's entry
	names := []byte{0}
	var dynamic []elf.Dyn64
	add := func(tag elf.DynTag, value string) {
		dynamic = append(dynamic, elf.Dyn64{Tag: int64(tag), Val: uint64(len(names))})
		names = append(append(names, value...), 0)
	}
	for _, n := range f.needed {
		add(elf.DT_NEEDED, n)
	}
	if f.runpath != "" {
		add(elf.DT_RUNPATH, f.runpath)
	}
	if f.rpath != "" {
		add(elf.DT_RPATH, f.rpath)
	}
	dynamic = append(dynamic, elf.Dyn64{Tag: int64(elf.DT_NULL)})

	interpreterAt := uint64(headers + 2*program)
	namesAt := interpreterAt + uint64(len(f.interpreter)) + 1
	dynamicAt := namesAt + uint64(len(names))
	dynamicSize := uint64(len(dynamic) * 16)
	h := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_DYN), Machine: uint16(f.machine), Version: uint32(elf.EV_CURRENT),
		Phoff: headers, Phentsize: program, Ehsize: headers, Shentsize: section,
	}
	loads := []elf.Prog64{{Type: uint32(elf.PT_DYNAMIC), Off: dynamicAt, Filesz: dynamicSize}}
	if f.interpreter != "" {
		loads = append(loads, elf.Prog64{Type: uint32(elf.PT_INTERP), Off: interpreterAt,
			Filesz: uint64(len(f.interpreter)) + 1})
	}
	h.Phnum = uint16(len(loads))
	// The first section is empty, as the format wants; names of sections are not needed.
	sections := []elf.Section64{{}, {Type: uint32(elf.SHT_STRTAB), Off: namesAt, Size: uint64(len(names))},
		{Type: uint32(elf.SHT_DYNAMIC), Off: dynamicAt, Size: dynamicSize, Link: 1, Entsize: 16}}
	if !f.noSections {
		h.Shoff, h.Shnum, h.Shstrndx = dynamicAt+dynamicSize, uint16(len(sections)), 1
	}

	var b bytes.Buffer
	write := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) } // a buffer takes everything
	write(h)
	write(loads)
	b.Write(make([]byte, int(interpreterAt)-b.Len()))
	b.WriteString(f.interpreter + "\x00")
	b.Write(names)
	write(dynamic)
	if !f.noSections {
		write(sections)
	}
	return b.Bytes()
}

// closureOf writes the files below root, which stands for a machine, and returns
// what the program is found to need: paths in the image, without root.
func closureOf(t *testing.T, root, program, directory string, files map[string]fakeELF) (found []string, err error) {
	for name, f := range files {
		file := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, f.bytes(), 0o644))
	}
	o, err := readObject(filepath.Join(root, program), "/usr/local/bin/program")
	require.NoError(t, err)
	objects, err := closure(o, []string{filepath.Join(root, "absent"), filepath.Join(root, directory)})
	for _, o := range objects {
		name, inRoot := filepath.Rel(root, o.to)
		if inRoot != nil || name[0] == '.' {
			name = o.to
		}
		found = append(found, name)
	}
	return found, err
}

func TestClosureHasEveryLibraryOnce(t *testing.T) {
	root := t.TempDir()
	loader := filepath.Join(root, "lib64/ld.so.2")
	found, err := closureOf(t, root, "bin/program", "lib", map[string]fakeELF{
		"bin/program":   {interpreter: loader, needed: []string{"liba.so", "libb.so", "ld.so.2"}},
		"lib64/ld.so.2": {},
		"lib/liba.so":   {needed: []string{"libc.so", "libb.so"}},
		"lib/libb.so":   {needed: []string{"liba.so", "libc.so", "ld.so.2"}}, // a circle
		"lib/libc.so":   {needed: []string{"ld.so.2"}},
		"lib/libd.so":   {},
	})
	require.NoError(t, err)
	require.Equal(t, []string{"lib64/ld.so.2", "lib/liba.so", "lib/libb.so", "lib/libc.so"}, found)
}

// On systems with a merged /usr the loader's directory and the libraries' are
// links, and often the loader itself: the kernel wants the loader at the path
// that the program names, loaders look for libraries in the real directories.
func TestLoaderAndLibrariesKeepTheirPaths(t *testing.T) {
	root := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(root, "usr/lib"), 0o755))
	require.NoError(t, os.Symlink("usr/lib", filepath.Join(root, "lib64")))
	require.NoError(t, os.Symlink("ld-2.so", filepath.Join(root, "usr/lib/ld.so.2")))
	require.NoError(t, os.Symlink("liba-1.so", filepath.Join(root, "usr/lib/liba.so")))
	found, err := closureOf(t, root, "program", "lib64", map[string]fakeELF{
		"program":           {interpreter: filepath.Join(root, "lib64/ld.so.2"), needed: []string{"liba.so"}},
		"usr/lib/ld-2.so":   {},
		"usr/lib/liba-1.so": {},
	})
	require.NoError(t, err)
	require.Equal(t, []string{"lib64/ld.so.2", "usr/lib/liba.so"}, found)
}

func TestStaticProgramNeedsNothing(t *testing.T) {
	found, err := closureOf(t, t.TempDir(), "program", "lib", map[string]fakeELF{"program": {}})
	require.NoError(t, err)
	require.Empty(t, found)
}

func TestLibrariesBesideTheProgramStayBesideIt(t *testing.T) {
	for name, program := range map[string]fakeELF{
		"RUNPATH":              {runpath: "relative:$ORIGIN/../own"},
		"braces":               {runpath: "${ORIGIN}/../own"},
		"RPATH":                {rpath: "$ORIGIN/../own"},
		"RUNPATH before RPATH": {runpath: "$ORIGIN/../own", rpath: "$ORIGIN/../lib"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			program.interpreter, program.needed = filepath.Join(root, "ld.so"), []string{"liba.so"}
			found, err := closureOf(t, root, "bin/program", "lib", map[string]fakeELF{
				"bin/program": program, "ld.so": {}, "own/liba.so": {}, "lib/liba.so": {},
			})
			require.NoError(t, err)
			require.Equal(t, []string{"ld.so", "/usr/local/own/liba.so"}, found)
		})
	}
}

func TestLibraryOfAnotherArchitectureIsPassedOver(t *testing.T) {
	root := t.TempDir()
	found, err := closureOf(t, root, "program", "lib", map[string]fakeELF{
		"program": {interpreter: filepath.Join(root, "ld.so"), needed: []string{"liba.so"},
			runpath: filepath.Join(root, "arm")},
		"ld.so":       {},
		"arm/liba.so": {machine: elf.EM_AARCH64},
		"lib/liba.so": {},
	})
	require.NoError(t, err)
	require.Equal(t, []string{"ld.so", "lib/liba.so"}, found)
}

func TestClosureFailsRatherThanLeaveSomethingOut(t *testing.T) {
	root := t.TempDir()
	loader := filepath.Join(root, "ld.so")
	for says, files := range map[string]map[string]fakeELF{
		"liba.so, which is in none": {"program": {interpreter: loader, needed: []string{"liba.so"}}, "ld.so": {}},
		"dynamic loader":            {"program": {interpreter: loader + ".absent"}},
		"working directory":         {"program": {interpreter: loader, needed: []string{"./liba.so"}}, "ld.so": {}},
	} {
		_, err := closureOf(t, root, "program", "lib", files)
		require.ErrorContains(t, err, says)
	}

	script := filepath.Join(root, "script")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\nexec envoy\n"), 0o755))
	_, err := readObject(script, "/script")
	require.ErrorContains(t, err, "no ELF file")
	require.NoError(t, os.WriteFile(script, fakeELF{needed: []string{"liba.so"}, noSections: true}.bytes(), 0o755))
	_, err = readObject(script, "/script")
	require.ErrorContains(t, err, "no section headers")
}

// The judge of a closure is the machine's own loader: a program of the machine
// runs with nothing there but what was found.
func TestDynamicProgramRunsWithWhatWasFound(t *testing.T) {
	p, err := platformOf(runtime.GOARCH)
	if err != nil {
		t.Skip("images are not made for this architecture:", err)
	}
	const program = "/bin/sh"
	shell, err := readObject(program, "/usr/local/bin/envoy")
	if err != nil || shell.interpreter == "" {
		t.Skipf("%s is not a dynamic program here: %v", program, err)
	}
	image, err := spec{recipe: recipes()[envoyImage], name: envoyImage, version: "0", arch: runtime.GOARCH,
		files: map[string]string{"envoy": program}}.build()
	require.NoError(t, err)
	libraries, err := closure(shell, p.directories)
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(libraries, func(o object) bool { return o.to == shell.interpreter }))
	require.Equal(t, "it runs\n", runIn(t, unpack(t, image), "envoy", "-c", "echo it runs"))
}
