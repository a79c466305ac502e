package files

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// do sends a request without the headers that Go adds by itself.
func (s *sandbox) do(method, query string, body io.Reader, headers ...string) (*http.Response, string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), method, s.url+Path+"?"+query, body)
	require.NoError(s.t, err)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}}
	answer, err := client.Do(r)
	require.NoError(s.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(s.t, err)
	return answer, string(text)
}

// post uploads a file.
func (s *sandbox) post(path string, body io.Reader, headers ...string) (*http.Response, string) {
	s.t.Helper()
	return s.do(http.MethodPost, pathQuery(path), body, append(headers, "Content-Type", "application/octet-stream")...)
}

func pathQuery(path string) string { return url.Values{"path": {path}}.Encode() }

func zipped(text string) string {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, text)
	_ = z.Close()
	return b.String()
}

func TestDownloadAnswersAsHTTPSays(t *testing.T) {
	s := start(t)
	s.put("a.txt", "0123456789")
	s.put("empty", "")
	require.NoError(t, os.Mkdir(s.path("dir"), 0o755))
	require.NoError(t, unix.Mkfifo(s.path("fifo"), 0o644))
	require.NoError(t, os.Symlink("/dev/zero", s.path("zero")))
	require.NoError(t, os.Symlink("a.txt", s.path("link")))
	first, _ := s.do(http.MethodGet, pathQuery("a.txt"), nil)
	etag := first.Header.Get("ETag")
	for name, c := range map[string]struct {
		method, query, accept, body string
		headers                     []string
		status                      int
		wantHeaders                 []string
	}{
		"whole": {query: pathQuery("a.txt"), body: "0123456789", status: 200, wantHeaders: []string{
			"Content-Length", "10", "Content-Type", "text/plain; charset=utf-8", "Accept-Ranges", "bytes",
			"Content-Disposition", "inline; filename=a.txt",
		}},
		"link":         {query: pathQuery("link"), body: "0123456789", status: 200},
		"range":        {query: pathQuery("a.txt"), headers: []string{"Range", "bytes=2-4"}, body: "234", status: 206},
		"bad range":    {query: pathQuery("a.txt"), headers: []string{"Range", "bytes=20-"}, status: 416},
		"not modified": {query: pathQuery("a.txt"), headers: []string{"If-None-Match", etag}, status: 304},
		"head": {
			method: http.MethodHead, query: pathQuery("a.txt"), status: 200,
			wantHeaders: []string{"Content-Length", "10", "ETag", etag},
		},
		"empty":   {query: pathQuery("empty"), status: 200, wantHeaders: []string{"Content-Length", "0"}},
		"gzip":    {query: pathQuery("a.txt"), accept: "gzip", body: "gzip", status: 200},
		"browser": {query: pathQuery("a.txt"), accept: "gzip, br", body: "0123456789", status: 200},
		"no gzip": {query: pathQuery("a.txt"), accept: "gzip;q=0", body: "0123456789", status: 200},
		"gzip range": {
			query: pathQuery("a.txt"), accept: "gzip", headers: []string{"Range", "bytes=0-1"}, body: "01", status: 206,
		},
		"nothing":   {query: pathQuery("none"), status: 404, body: "no such file"},
		"directory": {query: pathQuery("dir"), status: 400, body: "is a directory"},
		"fifo":      {query: pathQuery("fifo"), status: 400, body: "FIFO"},
		"device":    {query: pathQuery("zero"), status: 400, body: "device"},
		"NUL":       {query: "path=%00", status: 400, body: "NUL"},
		"twice":     {query: "path=a&path=b", status: 400, body: `\"path\" is given 2 times`},
		"user":      {query: pathQuery("a.txt") + "&username=xx", status: 401, body: `no user \"`},
		"delete":    {method: http.MethodDelete, query: pathQuery("a.txt"), status: 405},
	} {
		t.Run(name, func(t *testing.T) {
			if c.method == "" {
				c.method = http.MethodGet
			}
			answer, body := s.do(c.method, c.query, nil, append(c.headers, "Accept-Encoding", c.accept)...)
			require.Equal(t, c.status, answer.StatusCode, body)
			switch {
			case c.status < 300 && c.body == "gzip":
				z, err := gzip.NewReader(strings.NewReader(body))
				require.NoError(t, err)
				text, err := io.ReadAll(z)
				require.NoError(t, err)
				require.Equal(t, "0123456789", string(text))
			case c.status < 300:
				require.Equal(t, c.body, body)
			default:
				require.Contains(t, body, c.body)
			}
			for i := 0; i < len(c.wantHeaders); i += 2 {
				require.Equal(t, c.wantHeaders[i+1], answer.Header.Get(c.wantHeaders[i]), c.wantHeaders[i])
			}
		})
	}
	_, body := s.do(http.MethodGet, pathQuery("/proc/version"), nil)
	require.Contains(t, body, "Linux", "files of the kernel say that they are empty")
}

// part is one part of a form.
type part struct{ field, filename, contents string }

func form(parts ...part) (contentType, body string) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, p := range parts {
		to, _ := w.CreatePart(map[string][]string{
			"Content-Disposition": {fmt.Sprintf(`form-data; name=%q; filename="%s"`, p.field, p.filename)},
		})
		_, _ = io.WriteString(to, p.contents)
	}
	_ = w.Close()
	return w.FormDataContentType(), b.String()
}

func TestUploadWritesWhatTheRequestSays(t *testing.T) {
	type contents = map[string]string
	const boundaryX = "multipart/form-data; boundary=x"
	for name, c := range map[string]struct {
		path, contentType, coding, header, body string
		parts                                   []part
		status                                  int
		// wrong is in the message. want are the files afterwards, by path below the home.
		wrong string
		want  contents
	}{
		"stream":       {path: "a/b", body: "x", want: contents{"a/b": "x"}},
		"stream empty": {path: "a", want: contents{"a": ""}},
		"stream gzip": {
			path: "a", body: zipped("unzipped"),
			coding: "gzip", want: contents{"a": "unzipped"},
		},
		"stream without path": {status: 400, wrong: `"path" is missing`},
		"form with path":      {path: "q", parts: []part{{"file", "name", "x"}}, want: contents{"q": "x"}},
		"form of several": {
			parts: []part{{"file", "a/b c", "1"}, {"file", "./ä", "2"}, {"file", "%22q%22", "3"}, {"file", "%41", "4"}},
			want:  contents{"a/b c": "1", "ä": "2", `"q"`: "3", "%41": "4"},
		},
		"form of several with path": {
			path: "q", parts: []part{{"file", "a", "1"}, {"file", "b", "2"}},
			status: 400, wrong: "1 earlier files", want: contents{"q": "1"},
		},
		"form with one twice":   {parts: []part{{"file", "a", "1"}, {"file", "./a", "2"}}, status: 400, wrong: "twice"},
		"form with other part":  {parts: []part{{"files", "a", "1"}}, status: 400, wrong: `named \"file\"`},
		"form without name":     {parts: []part{{"file", "", "1"}}, status: 400, wrong: `no \"path\"`},
		"form without part":     {contentType: boundaryX, body: "--x--\r\n", status: 400, wrong: "no part"},
		"form without boundary": {contentType: "multipart/form-data", status: 400, wrong: "no boundary"},
		"form that is cut": {
			contentType: boundaryX, body: "--x\r\nContent-Disposition: form-data; name=file; filename=old\r\n\r\nx",
			status: 400, wrong: "cannot be read", want: contents{"old": "old"},
		},
		"other type":              {path: "a", contentType: "text/plain", status: 415, wrong: "multipart/form-data"},
		"other coding":            {path: "a", coding: "br", status: 415, wrong: "gzip"},
		"no gzip":                 {path: "a", body: "plain", coding: "gzip", status: 400},
		"directory":               {path: "dir", status: 400, wrong: "is a directory"},
		"below file":              {path: "old/x", status: 400, wrong: "parent that is not a directory"},
		"fifo":                    {path: "fifo", status: 400, wrong: "FIFO"},
		"device":                  {path: "/dev/null", status: 400, wrong: "device"},
		"replaced":                {path: "old", body: "new", want: contents{"old": "new"}},
		"link":                    {path: "link", body: "new", want: contents{"old": "new"}},
		"link that leads nowhere": {path: "broken", body: "new", want: contents{"dir/made": "new"}},
		"loop":                    {path: "loop", status: 400, wrong: "too many levels"},
		"several names":           {path: "old2", body: "new", want: contents{"old2": "new", "old3": "new"}},
		"gzip that is cut": {
			path: "old", body: zipped(strings.Repeat("x", 1000))[:20],
			coding: "gzip", status: 400, wrong: "cannot be read", want: contents{"old": "old"},
		},
		"metadata key": {
			path: "a", header: "X-Metadata-" + strings.Repeat("k", 250),
			status: 400, wrong: "246 bytes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			s.put("old", "old")
			s.put("old2", "old")
			require.NoError(t, os.Link(s.path("old2"), s.path("old3")))
			require.NoError(t, os.Mkdir(s.path("dir"), 0o755))
			require.NoError(t, os.Symlink("old", s.path("link")))
			require.NoError(t, os.Symlink("dir/made", s.path("broken")))
			require.NoError(t, os.Symlink("loop", s.path("loop")))
			require.NoError(t, unix.Mkfifo(s.path("fifo"), 0o644))
			if c.contentType == "" {
				c.contentType = "application/octet-stream"
			}
			if c.parts != nil {
				c.contentType, c.body = form(c.parts...)
			}
			if c.status == 0 {
				c.status = http.StatusOK
			}
			headers := []string{"Content-Type", c.contentType, "Content-Encoding", c.coding}
			if c.header != "" {
				headers = append(headers, c.header, "v")
			}
			query := ""
			if c.path != "" {
				query = pathQuery(c.path)
			}
			answer, body := s.do(http.MethodPost, query, strings.NewReader(c.body), headers...)
			require.Equal(t, c.status, answer.StatusCode, body)
			if c.status == http.StatusOK {
				var done []written
				require.NoError(t, json.Unmarshal([]byte(body), &done))
				for _, d := range done {
					require.Equal(t, "file", d.Type)
					require.True(t, strings.HasSuffix(d.Path, d.Name))
				}
			} else {
				var e struct{ Message string }
				require.NoError(t, json.Unmarshal([]byte(body), &e))
				require.Contains(t, e.Message, strings.ReplaceAll(c.wrong, `\"`, `"`))
			}
			for file, want := range c.want {
				require.Equal(t, want, s.contents(file), file)
			}
			left, err := os.ReadDir(s.home)
			require.NoError(t, err)
			for _, e := range left {
				require.False(t, strings.HasPrefix(e.Name(), stagingPrefix), "%s is left behind", e.Name())
			}
		})
	}
}

func TestReplacedFileKeepsPermissionsAndGetsNewMetadata(t *testing.T) {
	s := start(t)
	post := func(body string, headers ...string) string {
		answer, text := s.post("a", strings.NewReader(body), headers...)
		require.Equal(t, http.StatusOK, answer.StatusCode, text)
		return text
	}
	metadata := func() map[string]string {
		r, err := call(s, s.calls.Stat, &pb.StatRequest{Path: "a"})
		require.NoError(t, err)
		return r.GetEntry().GetMetadata()
	}
	text := post("1", "X-Metadata-Author", "me", "X-Metadata-Other", "x")
	require.Contains(t, text, `"metadata":{"author":"me","other":"x"}`)
	require.Equal(t, map[string]string{"author": "me", "other": "x"}, metadata())
	require.NoError(t, os.Chmod(s.path("a"), 0o755))
	post("2", "X-Metadata-Author", "you")
	require.Equal(t, map[string]string{"author": "you"}, metadata())
	require.NoError(t, os.Link(s.path("a"), s.path("b")))
	post("3")
	require.Empty(t, metadata(), "of a file that is written in place")
	require.Equal(t, "3", s.contents("b"))
	info, err := os.Stat(s.path("a"))
	require.NoError(t, err)
	require.EqualValues(t, 0o755, info.Mode().Perm())
}

func TestReaderSeesOldOrNewContentsOnly(t *testing.T) {
	s := start(t)
	s.put("a", "old")
	body, sender := io.Pipe()
	done := make(chan string)
	go func() {
		_, text := s.post("a", body)
		done <- text
	}()
	_, _ = io.WriteString(sender, strings.Repeat("new", copySize))
	require.Equal(t, "old", s.contents("a"))
	_ = sender.Close()
	require.Contains(t, <-done, `"name":"a"`)
	require.Equal(t, strings.Repeat("new", copySize), s.contents("a"))
}

func TestGzipBodyIsBoundedByWhatWasSent(t *testing.T) {
	var bomb bytes.Buffer
	z, _ := gzip.NewWriterLevel(&bomb, gzip.BestSpeed)
	_, _ = io.CopyN(z, zeros{}, gzipFree+(20<<20))
	_ = z.Close()
	require.Less(t, bomb.Len(), 1<<18)
	s := start(t)
	answer, text := s.post("a", &bomb, "Content-Encoding", "gzip")
	require.Equal(t, http.StatusRequestEntityTooLarge, answer.StatusCode, text)
	require.Contains(t, text, "becomes too large")
	require.NoFileExists(t, s.path("a"))
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func FuzzUpload(f *testing.F) {
	contentType, body := form(part{"file", "a/b", "contents"}, part{"file", "c", ""})
	f.Add("", contentType, "", []byte(body))
	f.Add("path=x", "application/octet-stream", "gzip", []byte(zipped("text")))
	f.Add("path=x", "application/octet-stream", "gzip", []byte(zipped("text")+zipped("more")+"rest"))
	f.Add("path=%7E/x", contentType, "gzip", []byte(zipped(body)))
	const nul = "--b\r\nContent-Disposition: form-data; name=file; filename*=utf-8''%00\r\n\r\nx\r\n--b--"
	f.Add("path=../x", "multipart/form-data; boundary=b", "", []byte(nul))
	f.Fuzz(func(t *testing.T, query, contentType, coding string, body []byte) {
		// Only the parsers: nothing is written.
		q, err := parseQuery(query)
		if err != nil {
			require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
			return
		}
		reader, err := decoded(http.Header{"Content-Encoding": {coding}}, bytes.NewReader(body))
		if err != nil {
			require.NotEqual(t, connect.CodeInternal, connect.CodeOf(coded(err)))
			return
		}
		account := self("/home/me")
		var total int64
		err = eachFile(q.path, contentType, reader, func(name string, contents io.Reader) error {
			if _, err := resolve(name, &account, ""); err != nil {
				return err
			}
			n, err := io.Copy(io.Discard, contents)
			total += n
			return err
		})
		if err != nil {
			code := connect.CodeOf(coded(err))
			require.Contains(t, []connect.Code{connect.CodeInvalidArgument, unsupported, tooLarge}, code, "%v", err)
		}
		require.LessOrEqual(t, total, int64(gzipFree+gzipRatio*len(body)))
	})
}

func TestConfigurationWritesLikeAnUpload(t *testing.T) {
	s := start(t)
	account := self(s.home)
	require.NoError(t, s.Write(account, "a/b", []byte("x"), 0o600))
	require.Equal(t, "x", s.contents("a/b"))
	info, err := os.Stat(s.path("a/b"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	require.ErrorContains(t, s.Write(account, "a", []byte("secret"), 0), "is a directory")
	require.NotContains(t, s.Write(account, "a\x00", []byte("secret"), 0).Error(), "secret")
}
