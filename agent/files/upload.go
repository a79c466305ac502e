package files

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"strings"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// These two have a status of their own in HTTP.
const (
	unsupported = connect.CodeUnimplemented
	tooLarge    = connect.CodeOutOfRange
)

// Limits of an upload.
const (
	// A compressed body may become gzipFree bytes, and gzipRatio times its own length beyond that, but
	// never more than gzipMost.
	gzipFree  = 64 << 20
	gzipRatio = 100
	gzipMost  = 16 << 30
	// maxFiles is the number of files in one form.
	maxFiles = 10_000
)

// upload is one request that writes files.
type upload struct {
	s        *Service
	account  *accounts.Account
	metadata map[string]string
	done     []written
}

// write writes one file.
func (u *upload) write(text string, body io.Reader) error {
	name, err := resolve(text, u.account, u.s.o.Dir())
	if err != nil {
		return err
	}
	for _, d := range u.done {
		if d.Path == name {
			return invalid("%.200q is in the request twice", name)
		}
	}
	if err := u.s.writeFile(u.account, name, body, u.metadata, 0); err != nil {
		return err
	}
	u.done = append(u.done, written{Name: path.Base(name), Path: name, Type: "file", Metadata: u.metadata})
	return nil
}

// eachFile calls write for each file in a body. path is the one in the query.
func eachFile(path, contentType string, body io.Reader, write func(name string, contents io.Reader) error) error {
	kind, params, err := mime.ParseMediaType(contentType)
	switch {
	case err == nil && kind == "application/octet-stream":
		if path == "" {
			return invalid(`"path" is missing in the query: a body of type application/octet-stream has no name`)
		}
		return write(path, body)
	case err == nil && kind == "multipart/form-data":
		if params["boundary"] == "" {
			return invalid("Content-Type has no boundary")
		}
		return eachPart(path, multipart.NewReader(body, params["boundary"]), write)
	default:
		return problem(unsupported, "Content-Type %.80q is not application/octet-stream or multipart/form-data", contentType)
	}
}

// eachPart calls write for each part of a form. Each is a file. Its name is the path in the query, or
// else its file name with all directories.
func eachPart(path string, form *multipart.Reader, write func(name string, contents io.Reader) error) error {
	for n := 0; ; n++ {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) && n > 0 {
			return nil
		}
		if errors.Is(err, io.EOF) {
			return invalid(`the form has no part named "file"`)
		}
		if err != nil {
			return badBody(err)
		}
		field, name, err := disposition(part.Header.Get("Content-Disposition"))
		switch {
		case err != nil:
			return err
		case field != "file":
			return invalid("a part of the form is named %.40q: files are parts named \"file\"", field)
		case path != "" && n > 0:
			return invalid(`"path" in the query names one file, but the form has several`)
		case path != "":
			name = path
		case name == "":
			return invalid(`a part of the form has no file name, and the query has no "path"`)
		case n == maxFiles:
			return problem(tooLarge, "the form has more than %d files", maxFiles)
		}
		if err := write(name, partReader{part}); err != nil {
			return err
		}
	}
}

// partReader gives the errors of a form their code.
type partReader struct{ part *multipart.Part }

func (p partReader) Read(b []byte) (int, error) {
	n, err := p.part.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = badBody(err)
	}
	return n, err
}

// disposition returns the field and the file name of a part. The name keeps its directories, which
// multipart.Part.FileName cuts off.
func disposition(header string) (field, name string, err error) {
	kind, params, err := mime.ParseMediaType(header)
	if err != nil || kind != "form-data" {
		return "", "", invalid("a part of the form has no Content-Disposition of type form-data")
	}
	// What browsers and the SDKs write for the three characters that a quoted name cannot have.
	return params["name"], strings.NewReplacer("%22", `"`, "%0D", "\r", "%0A", "\n").Replace(params["filename"]), nil
}

// partly says what an upload that failed has written.
func (u *upload) partly(err error) error {
	if len(u.done) == 0 {
		return err
	}
	var e *connect.Error
	errors.As(coded(err), &e)
	return problem(e.Code(), "%s; %d earlier files of the request are written, the last one is %s",
		e.Message(), len(u.done), u.done[len(u.done)-1].Path)
}

// metadataPrefix begins the headers of an upload that describe its files.
const metadataPrefix = "X-Metadata-"

// Limits of the metadata of one file, which extended attributes of most file systems keep.
const (
	maxMetadataKey = 255 - len(attributePrefix)
	maxMetadata    = 3 << 10
)

// metadataOf returns the metadata in the headers of an upload. Keys are in lower case, because HTTP does
// not keep their case.
func metadataOf(h http.Header) (map[string]string, error) {
	var found map[string]string
	size := 0
	for header, values := range h {
		key, ok := strings.CutPrefix(header, metadataPrefix)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		switch size += len(key) + len(values[0]); {
		case key == "":
			return nil, invalid("header %s has no key", metadataPrefix)
		case len(values) != 1:
			return nil, invalid("header %s%.40s is given %d times", metadataPrefix, key, len(values))
		case len(key) > maxMetadataKey:
			return nil, invalid("header %s%.40s...: the key has more than %d bytes", metadataPrefix, key, maxMetadataKey)
		case size > maxMetadata:
			return nil, invalid("the headers %s* have more than %d bytes", metadataPrefix, maxMetadata)
		}
		if found == nil {
			found = map[string]string{}
		}
		found[key] = values[0]
	}
	return maps.Clone(found), nil
}

// decoded returns the body without its coding.
func decoded(h http.Header, body io.Reader) (io.Reader, error) {
	switch coding := strings.ToLower(strings.Join(h.Values("Content-Encoding"), ",")); coding {
	case "", "identity":
		return body, nil
	case "gzip":
		counted := &countingReader{from: body}
		z, err := gzip.NewReader(counted)
		if err != nil {
			return nil, badBody(err)
		}
		return &boundedGzip{from: z, compressed: counted}, nil
	default:
		return nil, problem(unsupported, "Content-Encoding %.40q is not gzip", coding)
	}
}

type countingReader struct {
	from io.Reader
	n    int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.n += int64(n)
	return n, err
}

// boundedGzip refuses a body that becomes far larger than what was sent.
type boundedGzip struct {
	from       *gzip.Reader
	compressed *countingReader
	n          int64
}

func (b *boundedGzip) Read(p []byte) (int, error) {
	n, err := b.from.Read(p)
	b.n += int64(n)
	if b.n > gzipMost || b.n > gzipFree+gzipRatio*b.compressed.n {
		return 0, problem(tooLarge, "the body of type gzip becomes too large: "+
			"more than %d MiB and %d times what was sent, or more than %d GiB", gzipFree>>20, gzipRatio, gzipMost>>30)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = badBody(err)
	}
	return n, err
}

// badBody gives the errors of a body that is cut short or malformed their code. Those that say more keep
// theirs.
func badBody(err error) error {
	var known *connect.Error
	if errors.As(err, &known) {
		return err
	}
	return invalid("the body cannot be read: %w", err)
}

// clientReader gives the errors of a body that does not arrive their code.
type clientReader struct{ body io.Reader }

func (c clientReader) Read(p []byte) (int, error) {
	n, err := c.body.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = badBody(fmt.Errorf("reading from the client: %w", err))
	}
	return n, err
}
