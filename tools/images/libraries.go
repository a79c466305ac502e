package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// machines are the architectures that images are built for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// readProgram returns the machine type of a program, and whether it needs a dynamic loader.
func readProgram(file string) (machine elf.Machine, dynamic bool, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return 0, false, fmt.Errorf("%s is not an ELF file: %w", file, err)
	}
	defer func() { _ = f.Close() }() // only read
	for _, p := range f.Progs {
		dynamic = dynamic || p.Type == elf.PT_INTERP
	}
	return f.Machine, dynamic, nil
}

// libraryLine is a line of ldd: "libm.so.6 => /lib/libm.so.6 (0x7f)", or the loader's path alone.
var libraryLine = regexp.MustCompile(`(?m)^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$`)

// sharedLibraries returns the dynamic loader and every shared library that a program of
// this machine needs, directly or not, at their paths here. A library that a program opens
// by name while it runs is not among them.
func sharedLibraries(program string) (files, error) {
	listed, err := exec.Command("ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	if strings.Contains(string(listed), "not found") {
		return nil, fmt.Errorf("ldd %s: a library is missing:\n%s", program, listed)
	}
	all := files{}
	for _, line := range libraryLine.FindAllStringSubmatch(string(listed), -1) {
		content, err := os.ReadFile(line[1])
		if err != nil {
			return nil, err
		}
		all.add(line[1], 0o755, content)
	}
	return all, nil
}

// caFile is where Envoy's own image has the certificates of public authorities. The egress gateway of the chart reads
// them there (egress.caFile).
const caFile = "/etc/ssl/certs/ca-certificates.crt"

// publicAuthorities returns the certificates by which this machine verifies servers, at caFile. As for other programs
// SSL_CERT_FILE says which they are, if it is set.
func publicAuthorities() (files, error) {
	// Of Debian, Fedora and SUSE.
	all, places := files{}, []string{caFile, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"}
	if file := os.Getenv("SSL_CERT_FILE"); file != "" {
		places = []string{file}
	}
	for _, file := range places {
		content, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		all.add(caFile, 0o644, content)
		return all, err
	}
	return nil, fmt.Errorf("certificates of public authorities: none of %q exists; install ca-certificates", places)
}
