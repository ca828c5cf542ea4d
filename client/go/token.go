package wald

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

// ErrToken is in the chain of errors of a token that cannot be used or must not be sent.
var ErrToken = errors.New("the token cannot be used")

// WithToken is the token that every call carries.
func WithToken(token string) DialOption {
	return func(s *settings) { s.token = &tokenSource{fixed: true, token: hide(token)} }
}

// WithTokenFile is the file with the token that every call carries; white space around the token
// does not count. The client reads the file again at most once a second, and once when the server
// refuses the token. Then it repeats a call if the file has another token.
func WithTokenFile(path string) DialOption {
	return func(s *settings) { s.token = &tokenSource{path: path} }
}

// AllowInsecureToken lets the token cross a connection without TLS to another machine, where
// anybody in between can take it. Default: without TLS only to loopback.
func AllowInsecureToken() DialOption { return func(s *settings) { s.allowInsecureToken = true } }

// Maximum size of a token file, and the minimum time between two reads of it.
const (
	maxTokenBytes  = 16 << 10
	tokenReadPause = time.Second
)

// secret is a text inside a function, so that no verb of fmt shows it, wherever it is.
type secret func() string

func hide(text string) secret { return func() string { return text } }

// tokenSource is the token of a client.
type tokenSource struct {
	fixed bool
	path  string

	mutex sync.Mutex
	token secret
	read  time.Time
}

// load checks the token, and reads the file for the first time.
func (t *tokenSource) load() *Error {
	var token string
	var err error
	if t.fixed {
		token, err = cleanToken(t.token(), "the token")
	} else {
		token, err = readToken(t.path)
	}
	if err != nil {
		return badToken("%v", err)
	}
	t.token, t.read = hide(token), time.Now()
	return nil
}

func badToken(format string, args ...any) *Error {
	failure := invalid(format, args...)
	failure.cause = ErrToken
	return failure
}

func readToken(path string) (string, error) {
	content, err := readSmall(path, maxTokenBytes)
	if err != nil {
		return "", err
	}
	return cleanToken(string(content), path)
}

// cleanToken takes the white space around a token off. A header has only visible ASCII.
func cleanToken(text, place string) (string, error) {
	token := strings.TrimSpace(text)
	if token == "" {
		return "", fmt.Errorf("%s is empty, and must have a token", place)
	}
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s has characters that a token cannot have, such as white space inside", place)
	}
	return token, nil
}

// current is the token of the next call. A file with a fault is ignored: it may be replaced now.
func (t *tokenSource) current() string {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if !t.fixed && time.Since(t.read) >= tokenReadPause {
		t.reread()
	}
	return t.token()
}

func (t *tokenSource) reread() {
	t.read = time.Now()
	if token, err := readToken(t.path); err == nil {
		t.token = hide(token)
	}
}

// changed tells whether there is another token than the refused one.
func (t *tokenSource) changed(refused string) bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if !t.fixed && t.token() == refused {
		t.reread()
	}
	return t.token() != refused
}

// GetRequestMetadata gives the token to a call of gRPC, and notes it with the attempt.
func (t *tokenSource) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token := t.current()
	if a, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		a.token.Store(&token)
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity: Dial has decided.
func (t *tokenSource) RequireTransportSecurity() bool { return false }

// isLoopback tells whether a target of gRPC stays on this machine.
func isLoopback(target string) bool {
	if strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "unix-abstract:") {
		return true
	}
	host, _, err := net.SplitHostPort(target)
	if err != nil {
		return false
	}
	address := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || address != nil && address.IsLoopback()
}
