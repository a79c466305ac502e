package console

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

const (
	// sessionLife is how long a session lasts after the sign-in.
	sessionLife = 12 * time.Hour
	// clockSkew is by how much the clock of the replica that made a session may be ahead.
	clockSkew = 5 * time.Minute
	// cookieName has the prefix with which browsers take a cookie only from this host itself, and only with Secure.
	cookieName = "__Host-berth-console"
	// maxKey bounds an API key in bytes.
	maxKey = 256
)

// session is what a cookie holds.
type session struct {
	key string
	at  time.Time
}

func (s session) end() time.Time { return s.at.Add(sessionLife) }

// sealer seals and opens sessions.
type sealer struct{ aead cipher.AEAD }

// purpose is authenticated with each cookie, so that nothing else that the key has sealed is one.
var purpose = []byte("console session 1")

func newSealer(key [32]byte) (sealer, error) {
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return sealer{}, err
	}
	aead, err := cipher.NewGCM(block)
	return sealer{aead}, err
}

// seal returns the value of a cookie.
func (s sealer) seal(of session) (string, error) {
	nonce := make([]byte, s.aead.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return "", fmt.Errorf("seal a session: %w", err)
	}
	plain := append(binary.BigEndian.AppendUint64(nil, uint64(of.at.Unix())), of.key...)
	return base64.RawURLEncoding.EncodeToString(s.aead.Seal(nonce, nonce, plain, purpose)), nil
}

// errSession is the error of a cookie that is not a session, or not any more.
var errSession = errors.New("not a session")

// open returns the session of a cookie that has not ended.
func (s sealer) open(value string, now time.Time) (session, error) {
	raw, err := base64.RawURLEncoding.DecodeString(value)
	if err != nil || len(raw) < s.aead.NonceSize() {
		return session{}, errSession
	}
	nonce, sealed := raw[:s.aead.NonceSize()], raw[s.aead.NonceSize():]
	plain, err := s.aead.Open(nil, nonce, sealed, purpose)
	if err != nil || len(plain) < 8 {
		return session{}, errSession
	}
	found := session{key: string(plain[8:]), at: time.Unix(int64(binary.BigEndian.Uint64(plain)), 0)}
	if now.After(found.end()) || now.Before(found.at.Add(-clockSkew)) {
		return session{}, errSession
	}
	return found, nil
}

// session returns the session of a request.
func (c *Console) session(r *http.Request) (session, error) {
	if c.o.Open {
		return session{at: c.o.Now()}, nil
	}
	cookie, err := r.Cookie(cookieOf(r))
	if err != nil {
		return session{}, errSession
	}
	return c.seal.open(cookie.Value, c.o.Now())
}

// cookieOf is the name of the cookie. Consoles on one machine have the same host and other ports, which cookies do not
// tell apart.
func cookieOf(r *http.Request) string {
	if _, port, err := net.SplitHostPort(r.Host); err == nil && local(r) {
		return cookieName + "-" + port
	}
	return cookieName
}

// begin gives the browser a session.
func (c *Console) begin(w http.ResponseWriter, r *http.Request, key string) error {
	value, err := c.seal.seal(session{key: key, at: c.o.Now()})
	if err != nil {
		return err
	}
	setCookie(w, r, value, int(sessionLife.Seconds()))
	return nil
}

// end takes the session from the browser.
func end(w http.ResponseWriter, r *http.Request) { setCookie(w, r, "", -1) }

func setCookie(w http.ResponseWriter, r *http.Request, value string, seconds int) {
	http.SetCookie(w, &http.Cookie{
		Name: cookieOf(r), Value: value, Path: "/", MaxAge: seconds,
		Secure: true, HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
}
