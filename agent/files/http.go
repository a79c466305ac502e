package files

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// Path is where [Service.Files] is served.
const Path = "/files"

// copySize is the size of the one buffer that an upload or a compressed download has.
const copySize = 256 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// copyAll is io.Copy with a pooled buffer.
func copyAll(to io.Writer, from io.Reader) error {
	buffer := copyBuffers.Get().(*[copySize]byte)
	defer copyBuffers.Put(buffer)
	// Only the methods of these interfaces: ReadFrom and WriteTo would make buffers of their own.
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, buffer[:])
	return err
}

// Files serves /files: GET and HEAD answer a file, POST writes files.
func (s *Service) Files() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q, err := parseQuery(r.URL.RawQuery)
		if err != nil {
			fail(w, err)
			return
		}
		name, err := fileUser(r, q)
		if err != nil {
			fail(w, err)
			return
		}
		account, err := s.account(name)
		if err != nil {
			fail(w, err)
			return
		}
		switch r.Method {
		case http.MethodGet, http.MethodHead:
			err = s.download(w, r, q, account)
		case http.MethodPost:
			err = s.upload(w, r, q, account)
		default:
			w.Header().Set("Allow", "GET, HEAD, POST")
			http.Error(w, "GET, HEAD or POST", http.StatusMethodNotAllowed)
			return
		}
		if err != nil {
			fail(w, err)
		}
	})
}

// fileUser returns the name of the user for whom a request of /files is. Where the request is signed it
// is the one that the signature covers, so that a link for one user serves no other.
func fileUser(r *http.Request, q query) (string, error) {
	if q.user != "" || q.signed {
		return q.user, nil
	}
	return accounts.Named(r.Header)
}

// download answers a file. An error is returned only while nothing has been answered.
func (s *Service) download(w http.ResponseWriter, r *http.Request, q query, account *accounts.Account) error {
	name, err := resolve(q.path, account, s.o.Dir())
	if err != nil {
		return err
	}
	var file *os.File
	var info fs.FileInfo
	if err := as(account, func() (err error) {
		file, info, err = openRegular(name, unix.O_RDONLY)
		return err
	}, name); err != nil {
		return err
	}
	defer file.Close()

	h := w.Header()
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(name)}))
	contentType := mime.TypeByExtension(filepath.Ext(name))
	if contentType == "" {
		contentType = "application/octet-stream"
	}
	h.Set("Content-Type", contentType)
	h.Add("Vary", "Accept-Encoding")
	switch {
	case info.Size() == 0:
		return downloadUnsized(w, r, file)
	case wantsGzip(r.Header):
		h.Set("Content-Encoding", "gzip")
		if r.Method == http.MethodHead {
			return nil
		}
		return ended(compress(w, file))
	}
	stat := info.Sys().(*unixStat)
	h.Set("ETag", fmt.Sprintf(`"%x-%x-%x"`, stat.Ino, info.ModTime().UnixNano(), info.Size()))
	http.ServeContent(w, r, name, info.ModTime(), file)
	return nil
}

// downloadUnsized answers a file that says it is empty. Files of /proc and /sys say so and are not.
func downloadUnsized(w http.ResponseWriter, r *http.Request, file *os.File) error {
	// Some of them wait for news. The end of the request ends that.
	defer context.AfterFunc(r.Context(), func() { _ = file.Close() })()
	first := make([]byte, 4<<10)
	n, err := file.Read(first)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if n == 0 {
		w.Header().Set("Content-Length", "0")
	}
	if r.Method == http.MethodHead {
		return nil
	}
	w.WriteHeader(http.StatusOK)
	if _, err := w.Write(first[:n]); err != nil || n == 0 {
		return ended(err)
	}
	return ended(copyAll(w, file))
}

// ended ends the connection of an answer that cannot be completed, so that the client does not take what
// it has for the whole.
func ended(err error) error {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// wantsGzip reports whether gzip is the only coding that a request takes besides none at all. E2B's SDKs
// ask in this way. HTTP clients name several by themselves, for which compressing a local copy would
// only cost time.
func wantsGzip(h http.Header) bool {
	for _, name := range []string{"Range", "If-Range", "If-None-Match", "If-Modified-Since"} {
		if h.Get(name) != "" {
			return false
		}
	}
	wanted := false
	for coding := range strings.SplitSeq(strings.Join(h.Values("Accept-Encoding"), ","), ",") {
		coding, weight, _ := strings.Cut(strings.ToLower(strings.TrimSpace(coding)), ";")
		switch coding {
		case "", "identity":
		case "gzip":
			weight = strings.ReplaceAll(weight, " ", "")
			wanted = !strings.HasPrefix(weight, "q=0") || strings.Trim(weight, "q=0.") != ""
		default:
			return false
		}
	}
	return wanted
}

var compressors = sync.Pool{New: func() any {
	z, _ := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed)
	return z
}}

func compress(to io.Writer, from io.Reader) error {
	z := compressors.Get().(*gzip.Writer)
	defer compressors.Put(z)
	z.Reset(to)
	if err := copyAll(z, from); err != nil {
		return err
	}
	return z.Close()
}

// written is what the answer to an upload says about one file.
type written struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload writes the files of a request. An error is returned only while nothing has been answered.
func (s *Service) upload(w http.ResponseWriter, r *http.Request, q query, account *accounts.Account) error {
	u := upload{s: s, account: account}
	var err error
	if u.metadata, err = metadataOf(r.Header); err != nil {
		return err
	}
	body, err := decoded(r.Header, clientReader{r.Body})
	if err != nil {
		return err
	}
	if err := eachFile(q.path, r.Header.Get("Content-Type"), body, u.write); err != nil {
		return u.partly(err)
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(u.done)
}
