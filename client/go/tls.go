package wald

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// ErrTLS is in the chain of errors of calls for which there was no TLS connection, or whose
// server wants one. [Error.TLS] has the reason.
var ErrTLS = errors.New("no TLS connection")

// TLSFailure is why there is no TLS connection. It is an error, so that
// errors.Is(err, wald.TLSUnknownCA) works.
type TLSFailure string

const (
	// TLSSettings: a file or another setting of the client cannot be used.
	TLSSettings TLSFailure = "SETTINGS"
	// TLSUnknownCA: the server's certificate is from a CA that the client does not trust.
	TLSUnknownCA TLSFailure = "UNKNOWN_CA"
	// TLSWrongName: the server's certificate is for other names.
	TLSWrongName TLSFailure = "WRONG_NAME"
	// TLSExpired: the server's certificate is expired, or not valid yet.
	TLSExpired TLSFailure = "EXPIRED"
	// TLSCertificate: the server's certificate is refused for another reason.
	TLSCertificate TLSFailure = "CERTIFICATE"
	// TLSServerWithoutTLS: the endpoint begins with https, and the server does not speak TLS.
	TLSServerWithoutTLS TLSFailure = "SERVER_WITHOUT_TLS"
	// TLSServerWithTLS: the endpoint does not begin with https, and the server speaks TLS.
	TLSServerWithTLS TLSFailure = "SERVER_WITH_TLS"
	// TLSClientCertificateRequired: the server requires a certificate of the client, which sent none.
	TLSClientCertificateRequired TLSFailure = "CLIENT_CERTIFICATE_REQUIRED"
	// TLSClientCertificateRefused: the server refused the certificate of the client.
	TLSClientCertificateRefused TLSFailure = "CLIENT_CERTIFICATE_REFUSED"
	// TLSHandshake: the handshake failed for another reason.
	TLSHandshake TLSFailure = "HANDSHAKE"
)

// Error is the failure's name.
func (f TLSFailure) Error() string { return string(f) }

// WithTLSCA is the file with the CAs to trust instead of the system's, in PEM.
func WithTLSCA(file string) DialOption { return func(s *settings) { s.tls.ca = file } }

// WithTLSCert is the files with the client's certificate, followed by its issuers, and with its
// key, in PEM. Each new connection reads them again; files with a fault are ignored then.
func WithTLSCert(certFile, keyFile string) DialOption {
	return func(s *settings) { s.tls.cert, s.tls.key = certFile, keyFile }
}

// WithServerName is the name or address that the server's certificate must have, instead of the
// host of the endpoint or of a named owner.
func WithServerName(name string) DialOption { return func(s *settings) { s.tls.serverName = name } }

// tlsFiles are the settings of TLS.
type tlsFiles struct{ ca, cert, key, serverName string }

// Minimum time between two handshakes after one that failed.
const tlsPause = time.Second

// Maximum size of a file. The CAs of a system take about 250 KB.
const maxTLSFileBytes = 1 << 20

// tlsProblem is a failure with its sentence.
type tlsProblem struct {
	failure TLSFailure
	detail  string
}

func (p *tlsProblem) Error() string { return p.detail }

func tlsFault(format string, args ...any) *tlsProblem {
	return &tlsProblem{TLSSettings, fmt.Sprintf(format, args...)}
}

// asError is the error of a call that failed for the problem.
func (p *tlsProblem) asError() *Error {
	e := &Error{
		Code:       codes.Unavailable,
		TLS:        p.failure,
		Message:    "no TLS connection: " + p.detail,
		Outcome:    NotApplied,
		Retry:      Safe,
		RetryAfter: tlsPause,
		cause:      errors.Join(ErrTLS, p.failure),
	}
	if p.failure == TLSSettings {
		e.Code, e.Retry, e.RetryAfter = codes.InvalidArgument, Never, 0
	}
	return e
}

// lastTLSProblem is the last TLS failure of a client; nil once a server has answered.
type lastTLSProblem struct {
	mutex   sync.Mutex
	at      time.Time
	problem *tlsProblem
}

func (l *lastTLSProblem) set(problem *tlsProblem) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.at, l.problem = time.Now(), problem
}

func (l *lastTLSProblem) get() *tlsProblem {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.problem
}

// pause waits until a second has passed since the last failure.
func (l *lastTLSProblem) pause(ctx context.Context) error {
	l.mutex.Lock()
	left := time.Duration(0)
	if l.problem != nil {
		left = tlsPause - time.Since(l.at)
	}
	l.mutex.Unlock()
	if left <= 0 {
		return nil
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// explain turns the failure of a call that never left into the TLS failure that caused it. gRPC
// passes only the text of a handshake's error on, which `said` contains then.
func (l *lastTLSProblem) explain(e *Error, said string) *Error {
	problem := l.get()
	if problem == nil || e.Reason != "" || e.Outcome != NotApplied {
		return e
	}
	quoted := strconv.Quote(problem.detail)
	if !strings.Contains(said, problem.detail) && !strings.Contains(said, quoted[1:len(quoted)-1]) {
		return e
	}
	explained := problem.asError()
	if e.cause != nil {
		explained.cause = errors.Join(explained.cause, e.cause)
	}
	return explained
}

// TLSFailure is the last failure of TLS as an *Error, unless a server has answered since. Calls
// repeat such failures silently within their deadline.
func (c *Client) TLSFailure() error {
	if problem := c.settings.lastTLS.get(); problem != nil {
		return problem.asError()
	}
	return nil
}

// doorCredentials secure the connections of a client, or leave them in plaintext, and judge how
// the server answers.
//
//	files ─▶ tls.Config ─▶ handshake ─▶ first bytes ─▶ gRPC
//	                           │             │
//	                           └─ tlsProblem ┘
//
// After a failure the next handshake waits for a second, so that the connections of gRPC, which
// begins them at its own pace, do not load the server.
type doorCredentials struct {
	last *lastTLSProblem
	// Nil: plaintext.
	files *loadedFiles
}

func (d *doorCredentials) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if err := d.last.pause(ctx); err != nil {
		return nil, nil, err
	}
	creds := insecure.NewCredentials()
	if d.files != nil {
		creds = credentials.NewTLS(d.files.current())
	}
	secured, info, err := creds.ClientHandshake(ctx, authority, conn)
	if err != nil {
		if ctx.Err() != nil {
			return nil, nil, err
		}
		host, _, failure := net.SplitHostPort(authority)
		if failure != nil {
			host = authority
		}
		problem := handshakeProblem(err, host)
		d.last.set(problem)
		return nil, nil, problem
	}
	return &judgedConn{Conn: secured, last: d.last, secure: d.files != nil}, info, nil
}

func (d *doorCredentials) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these are credentials of clients")
}

func (d *doorCredentials) Info() credentials.ProtocolInfo {
	if d.files == nil {
		return insecure.NewCredentials().Info()
	}
	return credentials.NewTLS(&tls.Config{ServerName: d.files.serverName}).Info()
}

func (d *doorCredentials) Clone() credentials.TransportCredentials { return d }

func (d *doorCredentials) OverrideServerName(string) error { return nil }

// judgedConn judges the first bytes of the server: in TLS 1.3 a server refuses a client's
// certificate after the client's handshake, and a TLS server answers plaintext with an alert or
// an error of HTTP/1.1.
type judgedConn struct {
	net.Conn
	last     *lastTLSProblem
	secure   bool
	answered atomic.Bool
}

func (c *judgedConn) Read(bytes []byte) (int, error) {
	n, err := c.Conn.Read(bytes)
	if c.answered.Load() {
		return n, err
	}
	if problem := c.judge(bytes[:n], err); problem != nil {
		c.last.set(problem)
		return 0, problem
	}
	if n > 0 {
		c.answered.Store(true)
		c.last.set(nil)
	}
	return n, err
}

// Write: a server that refuses a connection may close it before the client has written all, and
// its answer is then still to be read.
func (c *judgedConn) Write(bytes []byte) (int, error) {
	n, err := c.Conn.Write(bytes)
	if err != nil && !c.answered.Load() && c.Conn.SetReadDeadline(time.Now().Add(100*time.Millisecond)) == nil {
		answer := make([]byte, 512)
		read, failure := c.Conn.Read(answer)
		if problem := c.judge(answer[:read], failure); problem != nil {
			c.last.set(problem)
			return n, problem
		}
	}
	return n, err
}

func (c *judgedConn) judge(first []byte, err error) *tlsProblem {
	switch {
	case c.secure && err != nil:
		return alertProblem(err)
	case !c.secure && wantsTLS(first):
		return &tlsProblem{TLSServerWithTLS, "the server speaks TLS; the endpoint must begin with https://"}
	}
	return nil
}

// First byte of a TLS record with an alert. The first frame of an HTTP/2 server begins with 0.
const tlsAlertRecord = 21

// wantsTLS tells whether these are the first bytes of a server that speaks TLS, in answer to
// plaintext. Wald, nginx and Go answer with these words.
func wantsTLS(first []byte) bool {
	if len(first) > 0 && first[0] == tlsAlertRecord {
		return true
	}
	if !bytes.HasPrefix(first, []byte("HTTP/1.")) {
		return false
	}
	for _, words := range []string{"use https://", "HTTPS port", "HTTPS server"} {
		if bytes.Contains(first, []byte(words)) {
			return true
		}
	}
	return false
}

// handshakeProblem reads the failure of a handshake with the server of this name.
func handshakeProblem(err error, name string) *tlsProblem {
	var unverified *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &unverified):
		return certificateProblem(unverified, name)
	case errors.As(err, &record):
		return &tlsProblem{TLSServerWithoutTLS, "the server does not speak TLS; without TLS the endpoint must not begin with https://"}
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return &tlsProblem{TLSHandshake, "the server closed the connection during the handshake; if it does not speak TLS, the endpoint must not begin with https://"}
	case strings.Contains(err.Error(), "missing selected ALPN"), alertNumber(err) == 120:
		return &tlsProblem{TLSHandshake, "the server does not offer HTTP/2 on this port (ALPN h2), which gRPC needs"}
	}
	if problem := alertProblem(err); problem != nil {
		return problem
	}
	return &tlsProblem{TLSHandshake, "the handshake failed: " + err.Error()}
}

// certificateProblem is the reason why the server's certificate was refused.
func certificateProblem(err *tls.CertificateVerificationError, name string) *tlsProblem {
	var leaf *x509.Certificate
	if len(err.UnverifiedCertificates) > 0 {
		leaf = err.UnverifiedCertificates[0]
	}
	var wrongName x509.HostnameError
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err.Err, &wrongName):
		return &tlsProblem{TLSWrongName, fmt.Sprintf("the server's certificate is for %s, not for %s", namesOf(leaf), name)}
	case errors.As(err.Err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil:
		whose := "the server's certificate"
		if leaf != nil && !invalid.Cert.Equal(leaf) {
			whose = "a CA of the server's certificate"
		}
		if now := time.Now(); now.Before(invalid.Cert.NotBefore) {
			return &tlsProblem{TLSExpired, fmt.Sprintf("%s is not valid before %s", whose, invalid.Cert.NotBefore.UTC().Format(time.DateOnly))}
		}
		return &tlsProblem{TLSExpired, fmt.Sprintf("%s expired on %s", whose, invalid.Cert.NotAfter.UTC().Format(time.DateOnly))}
	case errors.As(err.Err, &unknown):
		return &tlsProblem{TLSUnknownCA, "the server's certificate is not from a trusted CA; name the file with its CA (WithTLSCA)"}
	}
	return &tlsProblem{TLSCertificate, "the server's certificate is refused: " + printable(err.Err.Error())}
}

// namesOf lists the names of a certificate.
func namesOf(leaf *x509.Certificate) string {
	var names []string
	if leaf != nil {
		for _, name := range leaf.DNSNames {
			names = append(names, printable(name))
		}
		for _, address := range leaf.IPAddresses {
			names = append(names, address.String())
		}
	}
	if len(names) == 0 {
		return "no name at all"
	}
	return strings.Join(names, ", ")
}

// printable escapes the characters that could act on a terminal.
func printable(text string) string {
	quoted := strconv.QuoteToGraphic(text)
	return quoted[1 : len(quoted)-1]
}

// alertNumber is the alert that the server sent; -1: none. crypto/tls keeps its type of alerts to
// itself.
func alertNumber(err error) int {
	var received *net.OpError
	if errors.As(err, &received) && received.Op == "remote error" {
		if alert := reflect.ValueOf(received.Err); alert.Kind() == reflect.Uint8 {
			return int(alert.Uint())
		}
	}
	return -1
}

// alertProblem reads the server's alert about the client's certificate; nil: there is none. RFC 8446,
// section 6, has the numbers.
func alertProblem(err error) *tlsProblem {
	why := ""
	switch alertNumber(err) {
	case 116:
		return &tlsProblem{TLSClientCertificateRequired, "the server requires a client certificate, and none was sent (WithTLSCert)"}
	case 45:
		why = "it is expired or not valid yet"
	case 44:
		why = "it is revoked"
	case 48:
		why = "the server does not trust its CA"
	case 43:
		why = "it is not for clients"
	case 42, 46, 49:
		why = "the server's log has the reason"
	default:
		return nil
	}
	return &tlsProblem{TLSClientCertificateRefused, "the server refused the client certificate: " + why}
}

// loadedFiles are the settings of TLS in force, which follow the files.
type loadedFiles struct {
	tlsFiles
	mutex    sync.Mutex
	contents [3][]byte
	config   *tls.Config
}

// loadFiles reads all files.
func loadFiles(files tlsFiles) (*loadedFiles, *tlsProblem) {
	contents, problem := files.read()
	if problem != nil {
		return nil, problem
	}
	config, problem := files.parse(contents)
	if problem != nil {
		return nil, problem
	}
	return &loadedFiles{tlsFiles: files, contents: contents, config: config}, nil
}

// current is the settings of the next connection. A certificate and its key are replaced one
// after the other, so a fault may last for a moment only: the earlier settings stay in force.
func (l *loadedFiles) current() *tls.Config {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	contents, problem := l.read()
	same := bytes.Equal(contents[0], l.contents[0]) && bytes.Equal(contents[1], l.contents[1]) && bytes.Equal(contents[2], l.contents[2])
	if problem == nil && !same {
		if config, problem := l.parse(contents); problem == nil {
			l.contents, l.config = contents, config
		}
	}
	return l.config
}

func (f tlsFiles) read() (contents [3][]byte, problem *tlsProblem) {
	if (f.cert == "") != (f.key == "") {
		return contents, tlsFault("a client certificate needs both its file and the file of its key")
	}
	for i, path := range []string{f.ca, f.cert, f.key} {
		if path == "" {
			continue
		}
		content, err := readSmall(path, maxTLSFileBytes)
		if err != nil {
			return contents, tlsFault("%v", err)
		}
		contents[i] = content
	}
	return contents, nil
}

func (f tlsFiles) parse(contents [3][]byte) (*tls.Config, *tlsProblem) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.ca != "" {
		config.RootCAs = x509.NewCertPool()
		for rest := contents[0]; ; {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
			if block.Type != "CERTIFICATE" {
				continue
			}
			certificate, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, tlsFault("%s: not a certificate: %v", f.ca, err)
			}
			config.RootCAs.AddCert(certificate)
		}
		if config.RootCAs.Equal(x509.NewCertPool()) {
			return nil, tlsFault("%s: no certificate in PEM", f.ca)
		}
	}
	if f.cert != "" {
		pair, err := tls.X509KeyPair(contents[1], contents[2])
		switch {
		case err == nil:
		case strings.Contains(err.Error(), "does not match"):
			return nil, tlsFault("%s is not the key of the certificate %s", f.key, f.cert)
		case strings.Contains(err.Error(), "certificate"):
			return nil, tlsFault("%s: no certificate in PEM", f.cert)
		default:
			return nil, tlsFault("%s: no private key in PEM without a password", f.key)
		}
		// Sent whatever CAs the server names: the server then reports why it refuses it.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return config, nil
}

// readSmall reads a file of at most this size.
func readSmall(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("cannot read %s: %w", path, errors.Unwrap(err))
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err != nil {
		return nil, fmt.Errorf("cannot read %s: %w", path, err)
	}
	if int64(len(content)) > limit {
		return nil, fmt.Errorf("%s is larger than %d KiB", path, limit>>10)
	}
	return content, nil
}
