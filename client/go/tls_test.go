package wald

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"wald.dev/client/go/waldv1"
)

// authority is a CA of a test, with its files.
type authority struct {
	t    *testing.T
	dir  string
	ca   string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.ca = a.write("ca.pem", "CERTIFICATE", der)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *authority) write(name, kind string, der []byte) string {
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// issue writes a certificate for localhost, which begins and ends so long from now, and its key.
func (a *authority) issue(name string, begin, end time.Duration) (cert, key string) {
	a.t.Helper()
	own := newKey(a.t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(begin), NotAfter: time.Now().Add(end),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, own.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write(name+".pem", "CERTIFICATE", der), a.write(name+".key", "PRIVATE KEY", secret)
}

// issued is a certificate for localhost that is valid now.
func (a *authority) issued(name string) (cert, key string) {
	return a.issue(name, -time.Hour, time.Hour)
}

// serve starts a fake with TLS; `change` sets more of the server's settings. It counts connections.
func (a *authority) serve(cert, key string, change func(*tls.Config)) (endpoint string, accepted *atomic.Int32) {
	a.t.Helper()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		a.t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}}
	if change != nil {
		change(config)
	}
	endpoint, accepted = serveFake(a.t, credentials.NewTLS(config))
	return "https://" + endpoint, accepted
}

// requireClients makes a server require certificates of this CA.
func (a *authority) requireClients(config *tls.Config) {
	config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
	config.ClientCAs.AddCert(a.cert)
}

type countingListener struct {
	net.Listener
	accepted atomic.Int32
}

func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.accepted.Add(1)
	}
	return conn, err
}

func serveFake(t *testing.T, creds credentials.TransportCredentials) (string, *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{append: func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		return &waldv1.AppendResponse{Lsn: new(uint64(7))}, nil
	}}
	server := grpc.NewServer(grpc.Creds(creds))
	waldv1.RegisterWalServiceServer(server, f)
	counting := &countingListener{Listener: listener}
	go server.Serve(counting)
	t.Cleanup(server.Stop)
	return listener.Addr().String(), &counting.accepted
}

// fails makes one append, which must fail for this reason, with these words.
func fails(t *testing.T, endpoint string, failure TLSFailure, words string, options ...DialOption) {
	t.Helper()
	client := dial(t, endpoint, options...)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err := client.Append(ctx, "a", Text("x"))
	var e *Error
	if !errors.As(err, &e) || e.TLS != failure || !errors.Is(err, failure) || !errors.Is(err, ErrTLS) {
		t.Fatalf("got %v, expected %s", err, failure)
	}
	if !strings.Contains(e.Message, words) || e.Outcome != NotApplied || e.Retry != Safe {
		t.Errorf("got %v (%s, %s), expected %q", err, e.Outcome, e.Retry, words)
	}
	if last := client.TLSFailure(); !errors.Is(last, failure) {
		t.Errorf("the last failure is %v", last)
	}
}

func succeeds(t *testing.T, client *Client) {
	t.Helper()
	if ack, err := client.Append(soon(t), "a", Text("x")); err != nil || ack.LSN != 7 {
		t.Errorf("got %v, %v", ack, err)
	}
	if err := client.TLSFailure(); err != nil {
		t.Errorf("a failure is left: %v", err)
	}
}

func TestHTTPSEndpointIsSecuredByTheGivenCA(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("server")
	endpoint, _ := a.serve(cert, key, nil)
	succeeds(t, dial(t, endpoint, WithTLSCA(a.ca)))
}

func TestServerOfAnUnknownCAIsRefused(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("server")
	endpoint, _ := a.serve(cert, key, nil)
	fails(t, endpoint, TLSUnknownCA, "not from a trusted CA", WithTLSCA(newAuthority(t).ca))
	fails(t, endpoint, TLSUnknownCA, "not from a trusted CA")
}

func TestServerOfAnotherNameIsRefusedWithBothNames(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("server")
	endpoint, _ := a.serve(cert, key, nil)
	fails(t, endpoint, TLSWrongName, "for localhost, 127.0.0.1, not for wald.internal", WithTLSCA(a.ca), WithServerName("wald.internal"))
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(endpoint, "https://"))
	succeeds(t, dial(t, "https://127.0.0.1:"+port, WithTLSCA(a.ca), WithServerName("localhost")))
}

func TestExpiredServerIsRefusedWithTheDay(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue("server", -48*time.Hour, -24*time.Hour)
	endpoint, _ := a.serve(cert, key, nil)
	day := time.Now().Add(-24 * time.Hour).UTC().Format(time.DateOnly)
	fails(t, endpoint, TLSExpired, "expired on "+day, WithTLSCA(a.ca))
}

func TestPlaintextServerIsNamed(t *testing.T) {
	a := newAuthority(t)
	endpoint, _ := serveFake(t, insecure.NewCredentials())
	fails(t, "https://"+endpoint, TLSServerWithoutTLS, "does not speak TLS", WithTLSCA(a.ca))
}

func TestTLSServerIsNamedToAPlaintextClient(t *testing.T) {
	for _, answer := range []string{"HTTP/1.1 400 Bad Request\r\n\r\nuse https://", "\x15\x03\x01\x00\x02\x02\x46"} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				// Reads first: closing with unread bytes would take the answer away.
				conn.Read(make([]byte, 1024))
				conn.Write([]byte(answer))
				conn.Close()
			}
		}()
		fails(t, listener.Addr().String(), TLSServerWithTLS, "must begin with https://")
	}
}

func TestClientCertificateIsSentAndItsRefusalIsNamed(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	cert, key := a.issued("server")
	endpoint, _ := a.serve(cert, key, a.requireClients)
	succeeds(t, dial(t, endpoint, WithTLSCA(a.ca), WithTLSCert(a.issued("client"))))
	fails(t, endpoint, TLSClientCertificateRequired, "none was sent", WithTLSCA(a.ca))
	cert, key = other.issued("client")
	fails(t, endpoint, TLSClientCertificateRefused, "does not trust its CA", WithTLSCA(a.ca), WithTLSCert(cert, key))
	cert, key = a.issue("old", -2*time.Hour, -time.Hour)
	fails(t, endpoint, TLSClientCertificateRefused, "client certificate", WithTLSCA(a.ca), WithTLSCert(cert, key))
}

func TestReplacedFilesAreUsedByTheNextConnection(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("server")
	endpoint, accepted := a.serve(cert, key, a.requireClients)
	cert, key = a.issue("client", -2*time.Hour, -time.Hour)
	client := dial(t, endpoint, WithTLSCA(a.ca), WithTLSCert(cert, key))
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := client.Append(ctx, "a", Text("x")); !errors.Is(err, TLSClientCertificateRefused) {
		t.Fatalf("got %v", err)
	}
	a.issued("client")
	succeeds(t, client)
	if n := accepted.Load(); n > 3 {
		t.Errorf("%d connections", n)
	}
}

func TestAtMostOneHandshakeASecondIsTriedByAllCalls(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("server")
	endpoint, accepted := a.serve(cert, key, nil)
	client := dial(t, endpoint, WithTLSCA(newAuthority(t).ca), WithRetry(DefaultRetryPolicy()))
	ctx, cancel := context.WithTimeout(context.Background(), 2500*time.Millisecond)
	defer cancel()
	done := make(chan error)
	for range 20 {
		go func() {
			_, err := client.Append(ctx, "a", Text("x"))
			done <- err
		}()
	}
	for range 20 {
		if err := <-done; !errors.Is(err, TLSUnknownCA) {
			t.Errorf("got %v", err)
		}
	}
	// The connection that waits for its turn is open already.
	if n := accepted.Load(); n < 2 || n > 4 {
		t.Errorf("%d connections in 2.5 s", n)
	}
}

func TestSettingsOfTLSThatCannotBeUsedAreNamedByDial(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("client")
	_, other := a.issued("other")
	empty := filepath.Join(a.dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(a.dir, "missing")
	for words, option := range map[string]DialOption{
		missing + ": no such file":        WithTLSCA(missing),
		empty + ": no certificate":        WithTLSCA(empty),
		other + " is not the key of":      WithTLSCert(cert, other),
		empty + ": no private key in PEM": WithTLSCert(cert, empty),
		"needs both its file and":         WithTLSCert(cert, ""),
		key + ": no certificate in PEM":   WithTLSCert(key, key),
		a.dir + ": is a directory":        WithTLSCA(a.dir),
	} {
		_, err := Dial("https://localhost", option)
		var e *Error
		if !errors.As(err, &e) || e.TLS != TLSSettings || e.Retry != Never || !strings.Contains(e.Message, words) {
			t.Errorf("got %v, expected %q", err, words)
		}
	}
	if _, err := Dial("localhost", WithTLSCA(a.ca)); err == nil || !strings.Contains(err.Error(), "must begin with https://") {
		t.Errorf("got %v", err)
	}
}

func TestEnvironmentHasTheSettings(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issued("server")
	endpoint, _ := a.serve(cert, key, a.requireClients)
	cert, key = a.issued("client")
	token := filepath.Join(a.dir, "token")
	if err := os.WriteFile(token, []byte("k7Qp2mXa\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"WALD_ENDPOINT": endpoint, "WALD_TLS_CA": a.ca, "WALD_TLS_CERT": cert, "WALD_TLS_KEY": key,
		"WALD_TLS_SERVER_NAME": "localhost", "WALD_TOKEN_FILE": token, "WALD_TOKEN": "",
	} {
		t.Setenv(name, value)
	}
	client, err := FromEnv()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	succeeds(t, client)
	if got := client.settings.token.current(); got != "k7Qp2mXa" {
		t.Error("the token is another one")
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, value := range []any{client, client.settings, client.settings.token} {
			if text := fmt.Sprintf(verb, value); strings.Contains(text, "k7Qp2mXa") {
				t.Errorf("%s of %T shows the token", verb, value)
			}
		}
	}
	t.Setenv("WALD_TLS_CA", filepath.Join(a.dir, "missing"))
	if _, err := FromEnv(); !errors.Is(err, TLSSettings) {
		t.Errorf("got %v", err)
	}
}
