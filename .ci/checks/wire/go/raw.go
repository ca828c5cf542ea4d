package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"
)

const (
	wal        = "/wald.v1.WalService/"
	ops        = "/wald.v1.OpsService/"
	health     = "/grpc.health.v1.Health/"
	reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
)

// raw is a connection without HTTP/2 rules. Frames are written to `out` first.
type raw struct {
	net.Conn
	in      *http2.Framer
	out     *http2.Framer
	pending bytes.Buffer
	block   bytes.Buffer
	encoder *hpack.Encoder
	next    uint32
	// The peer stays when one of its calls ends.
	stays bool
}

// connect opens a connection, inside TLS with -ca; a receive buffer of 0 bytes is the system's own size.
func connect(address string, receive int) (net.Conn, error) {
	dialer := net.Dialer{}
	if receive > 0 {
		dialer.Control = func(_, _ string, connection syscall.RawConn) error {
			return connection.Control(func(fd uintptr) {
				_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, receive)
			})
		}
	}
	connection, err := dialer.Dial("tcp", address)
	if err != nil || secured == nil {
		return connection, err
	}
	over := tls.Client(connection, secured)
	return over, over.Handshake()
}

// secured are the settings of TLS; nil: plaintext.
var secured *tls.Config

// trust turns TLS on, with the CA of a file.
func trust(file string) error {
	pem, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("%s has no certificate", file)
	}
	secured = &tls.Config{
		RootCAs: roots, ServerName: "localhost", NextProtos: []string{"h2"},
		// The cheapest, as many clients share a machine.
		CurvePreferences: []tls.CurveID{tls.X25519},
	}
	return nil
}

func open(address string, receive int, settings ...http2.Setting) (*raw, error) {
	connection, err := connect(address, receive)
	if err != nil {
		return nil, err
	}
	found := &raw{Conn: connection, next: 1}
	found.in = http2.NewFramer(nil, connection)
	found.out = http2.NewFramer(&found.pending, nil)
	found.out.AllowIllegalWrites = true
	found.encoder = hpack.NewEncoder(&found.block)
	found.pending.WriteString(http2.ClientPreface)
	_ = found.out.WriteSettings(settings...)
	return found, found.flush()
}

// flush sends all pending frames.
func (r *raw) flush() error {
	_, err := r.Write(r.pending.Bytes())
	r.pending.Reset()
	return err
}

// headers encodes the head of a call.
func (r *raw) headers(path string) []byte {
	r.block.Reset()
	encode(r.encoder, path, false)
	return bytes.Clone(r.block.Bytes())
}

// unindexed encodes the head of a call and leaves the table of the connection as it is.
func unindexed(path string) []byte {
	var block bytes.Buffer
	encode(hpack.NewEncoder(&block), path, true)
	return block.Bytes()
}

func encode(encoder *hpack.Encoder, path string, unindexed bool) {
	scheme := "http"
	if secured != nil {
		scheme = "https"
	}
	for _, field := range [][2]string{
		{":method", "POST"}, {":scheme", scheme}, {":path", path}, {":authority", "wald"},
		{"te", "trailers"}, {"content-type", "application/grpc"},
	} {
		_ = encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1], Sensitive: unindexed})
	}
}

// call writes the head of a call and its body, which may end the request; it returns the stream.
func (r *raw) call(path string, body []byte, end bool) uint32 {
	stream := r.next
	r.next += 2
	_ = r.out.WriteHeaders(http2.HeadersFrameParam{
		StreamID: stream, BlockFragment: r.headers(path), EndHeaders: true, EndStream: end && body == nil,
	})
	for at := 0; at < len(body); at += 16384 {
		last := min(at+16384, len(body))
		_ = r.out.WriteData(stream, end && last == len(body), body[at:last])
	}
	return stream
}

// message is a gRPC message; its prefix announces its exact number of bytes.
func message(m proto.Message) []byte {
	body, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return append(prefix(len(body)), body...)
}

// prefix announces a message of this length.
func prefix(length int) []byte {
	return binary.BigEndian.AppendUint32([]byte{0}, uint32(length))
}
