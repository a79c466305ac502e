// Command backend stands for all sandboxes: one process that answers at every address of 127.0.0.0/8. It costs as
// little as it can, because it shares the cores with what is measured.
package main

import (
	"bytes"
	"crypto/sha1"
	"encoding/base64"
	"errors"
	"flag"
	"io"
	"log"
	"net"
	"os"
	"strconv"
)

var once = flag.Bool("once", false, "close each connection after one answer")

// main serves on file descriptor 3, which the parent has bound.
func main() {
	flag.Parse()
	if *once {
		answer = bytes.Replace(answer, []byte("\r\n\r\n"), []byte("\r\nConnection: close\r\n\r\n"), 1)
	}
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		log.Fatal(err)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			err := serve(c)
			_ = c.Close()
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				log.Print(err)
			}
		}()
	}
}

var answer = []byte("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok")

// serve answers requests until the peer closes the connection, and returns what ended it.
func serve(c net.Conn) error {
	buf := make([]byte, 4<<10)
	have := 0
	for {
		end := bytes.Index(buf[:have], []byte("\r\n\r\n"))
		for end < 0 {
			if have == len(buf) {
				return errors.New("a request with too long a header")
			}
			n, err := c.Read(buf[have:])
			if err != nil {
				return err
			}
			have += n
			end = bytes.Index(buf[:have], []byte("\r\n\r\n"))
		}
		head := buf[:end+2]
		if key := header(head, "sec-websocket-key"); key != nil {
			return echo(c, key)
		}
		length, err := strconv.Atoi(string(header(head, "content-length")))
		if err != nil {
			length = 0 // no body
		}
		have = copy(buf, buf[end+4:have])
		for length > 0 {
			length -= min(have, length)
			if have = 0; length == 0 {
				break
			}
			n, err := c.Read(buf[:min(len(buf), length)])
			if err != nil {
				return err
			}
			have = n
		}
		if _, err := c.Write(answer); err != nil || *once {
			return err
		}
	}
}

// header returns the value of the first header of that name, which is in lower case.
func header(head []byte, name string) []byte {
	for line := range bytes.SplitSeq(head, []byte("\r\n")) {
		key, value, ok := bytes.Cut(line, []byte(":"))
		if ok && len(key) == len(name) && bytes.EqualFold(key, []byte(name)) {
			return bytes.TrimSpace(value)
		}
	}
	return nil
}

// echo returns the messages of a WebSocket: one frame each, of at most 125 bytes, whose mask is zero.
func echo(c net.Conn, key []byte) error {
	accept := sha1.Sum(append(bytes.Clone(key), "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"...))
	_, err := io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
		"Sec-WebSocket-Accept: "+base64.StdEncoding.EncodeToString(accept[:])+"\r\n\r\n")
	if err != nil {
		return err
	}
	buf := make([]byte, 2+4+125)
	for {
		if _, err := io.ReadFull(c, buf[:2+4]); err != nil {
			return err
		}
		size := int(buf[1] & 0x7f)
		if _, err := io.ReadFull(c, buf[6:6+size]); err != nil {
			return err
		}
		buf[4], buf[5] = buf[0], byte(size) // without the mask
		if _, err := c.Write(buf[4 : 6+size]); err != nil {
			return err
		}
	}
}
