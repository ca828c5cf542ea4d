package wald

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"wald.dev/client/go/waldv1"
)

// door is a server that takes one token, and refuses others for a reason.
type door struct {
	mutex  sync.Mutex
	token  string
	reason Reason
	calls  int
}

func (d *door) open(token string) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.token = token
}

// check is nil if a call carries the right token, once.
func (d *door) check(ctx context.Context) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.calls++
	found, _ := metadata.FromIncomingContext(ctx)
	given := found.Get("authorization")
	if len(given) == 1 && given[0] == "Bearer "+d.token {
		return nil
	}
	retry := Never
	if d.reason == ErrCredentialExpired {
		retry = Safe
	}
	return refusal(codes.Unauthenticated, d.reason, stated(NotApplied, retry))
}

func (d *door) seen() int {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.calls
}

// guard makes a fake check every call. `after` is the number of acks of a session after which the
// server looks again.
func (d *door) guard(f *fake) {
	f.options = []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := d.check(ctx); err != nil {
				return nil, err
			}
			return handle(ctx, request)
		}),
		grpc.StreamInterceptor(func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if err := d.check(stream.Context()); err != nil {
				return err
			}
			return handle(server, stream)
		}),
	}
	f.append = func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		return &waldv1.AppendResponse{Lsn: new(uint64(7))}, nil
	}
	// The opening of a stream is checked with its first request.
	f.shared = func(stream sessionStream) error {
		for first := true; ; first = false {
			request, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil && !first {
				err = d.check(stream.Context())
			}
			if err == nil {
				err = stream.Send(f.answerOf(request))
			}
			if err != nil {
				return err
			}
		}
	}
}

func tokenFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	writeToken(t, path, text)
	return path
}

func writeToken(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestEveryCallCarriesTheToken(t *testing.T) {
	d, f := &door{token: "first", reason: ErrBadCredential}, new(fake)
	d.guard(f)
	client := f.start(t, WithToken(" first\n"))
	if _, err := client.Append(soon(t), "a", Text("x")); err != nil {
		t.Error(err)
	}
	client = f.dial(t)
	_, err := client.Append(soon(t), "a", Text("x"))
	if !errors.Is(err, ErrBadCredential) || d.seen() != 2 {
		t.Errorf("got %v after %d calls", err, d.seen())
	}
}

func TestRefusedTokenIsReadAgainFromItsFileAndTheCallRepeated(t *testing.T) {
	for _, reason := range []Reason{ErrBadCredential, ErrCredentialExpired} {
		d, f := &door{token: "first", reason: reason}, new(fake)
		d.guard(f)
		path := tokenFile(t, "first")
		client := f.start(t, WithTokenFile(path))
		if _, err := client.Append(soon(t), "a", Text("x")); err != nil {
			t.Fatal(err)
		}
		d.open("second")
		writeToken(t, path, "second\n")
		// A plain append: nothing was applied, so that it is repeated.
		if _, err := client.Append(soon(t), "a", Text("x")); err != nil || d.seen() != 3 {
			t.Errorf("%s: got %v after %d calls", reason, err, d.seen())
		}
	}
}

func TestRefusedTokenThatTheFileStillHasIsNotSentAgain(t *testing.T) {
	for _, reason := range []Reason{ErrBadCredential, ErrCredentialExpired} {
		d, f := &door{token: "second", reason: reason}, new(fake)
		d.guard(f)
		_, err := f.start(t, WithTokenFile(tokenFile(t, "first"))).Append(soon(t), "a", Text("x"))
		if !errors.Is(err, reason) || d.seen() != 1 {
			t.Errorf("got %v after %d calls", err, d.seen())
		}
		_, err = f.dial(t, WithToken("first")).Append(soon(t), "a", Text("x"))
		if !errors.Is(err, reason) || d.seen() != 2 || strings.Contains(err.Error(), "first") {
			t.Errorf("got %v after %d calls", err, d.seen())
		}
	}
}

func TestProducerGoesOnAcrossAnExpiredToken(t *testing.T) {
	d, f := &door{token: "first", reason: ErrCredentialExpired}, new(fake)
	d.guard(f)
	f.get = func(*waldv1.GetLogRequest) (*waldv1.GetLogResponse, error) {
		return &waldv1.GetLogResponse{Log: &waldv1.Log{LogId: 1}}, nil
	}
	applied := uint64(0)
	f.session = func(stream waldv1.WalService_AppendSessionServer) error {
		for {
			request, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if err := d.check(stream.Context()); err != nil {
				return err
			}
			first := applied
			applied++
			if err := stream.Send(&waldv1.AppendSessionResponse{RequestId: request.RequestId, Ack: &waldv1.AppendBatchResponse{
				Appends: []*waldv1.LogAppend{{Log: "a", FirstLsn: &first, NextLsn: new(first + 1)}}}}); err != nil {
				return err
			}
		}
	}
	path := tokenFile(t, "first")
	interrupted := make(chan error, 1000)
	client := f.start(t, WithTokenFile(path))
	producer, err := client.Producer(soon(t), "a", WithProducerID("p", 0),
		OnProducerInterruption(func(err error) { interrupted <- err }))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := producer.Append(soon(t), []Record{Text("0")}); err != nil {
		t.Fatal(err)
	}
	d.open("second")
	pending, err := producer.Send(soon(t), []Record{Text("1")})
	if err != nil {
		t.Fatal(err)
	}
	// The file comes later than the end of the token.
	if err := <-interrupted; !errors.Is(err, ErrCredentialExpired) {
		t.Errorf("interrupted by %v", err)
	}
	writeToken(t, path, "second")
	if ack, err := pending.Wait(soon(t)); err != nil || ack.FirstLSN != 1 {
		t.Errorf("got %v, %v", ack, err)
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
}

func TestFollowerGoesOnAcrossAnExpiredToken(t *testing.T) {
	d, f := &door{token: "first", reason: ErrCredentialExpired}, new(fake)
	d.guard(f)
	expired := make(chan struct{})
	f.scan = func(request *waldv1.ScanRequest, stream waldv1.WalService_ScanServer) error {
		if request.GetCursor() == nil {
			if err := stream.Send(&waldv1.ScanResponse{CaughtUp: true, Cursor: []byte("1")}); err != nil {
				return err
			}
			<-expired
			return refusal(codes.Unauthenticated, ErrCredentialExpired, nil)
		}
		return stream.Send(&waldv1.ScanResponse{CaughtUp: true, Cursor: append(request.GetCursor(), '2'),
			Gaps: []*waldv1.Gap{{Log: "a", FromLsn: new(uint64(1))}}})
	}
	path := tokenFile(t, "first")
	client := f.start(t, WithTokenFile(path))
	follower := client.Follow(soon(t), Log("a"))
	defer follower.Close()
	if !follower.Next(soon(t)) {
		t.Fatal(follower.Err())
	}
	d.open("second")
	writeToken(t, path, "second")
	close(expired)
	if !follower.Next(soon(t)) || string(follower.Cursor()) != "12" {
		t.Errorf("got %v, cursor %q", follower.Err(), follower.Cursor())
	}
}

func TestTokenCrossesPlaintextOnlyToLoopback(t *testing.T) {
	for endpoint, good := range map[string]bool{
		"127.0.0.1": true, "localhost": true, "[::1]": true, "http://127.1.2.3:80": true, "https://wald.internal": true, "unix:/x": true,
		"wald.internal": false, "http://10.0.0.1": false, "dns:///wald": false, "0.0.0.0": false, "127.0.0.1.nip.io": false,
	} {
		client, err := Dial(endpoint, WithToken("secret"))
		if client != nil {
			client.Close()
		}
		if (err == nil) != good || err != nil && (!errors.Is(err, ErrToken) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
	client, err := Dial("wald.internal", WithToken("secret"), AllowInsecureToken())
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
}

func TestTokenThatCannotBeUsedIsNamedByDial(t *testing.T) {
	for text, words := range map[string]string{
		"": "is empty", " \n": "is empty", "sec\nret": "characters", "sécret": "characters", "se cret": "characters",
		strings.Repeat("a", maxTokenBytes+1): "larger than",
	} {
		path := tokenFile(t, text)
		_, err := Dial("localhost", WithTokenFile(path))
		if !errors.Is(err, ErrToken) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), words) {
			t.Errorf("got %v, expected %q", err, words)
		}
		if err != nil && strings.Contains(err.Error(), "cret") {
			t.Error("the error shows the token")
		}
	}
	if _, err := Dial("localhost", WithTokenFile("/missing")); !errors.Is(err, ErrToken) || !strings.Contains(err.Error(), "/missing: no such file") {
		t.Errorf("got %v", err)
	}
}

func TestFileThatChangesIsReadAtMostOnceASecond(t *testing.T) {
	path := tokenFile(t, "first")
	source := &tokenSource{path: path}
	if failure := source.load(); failure != nil {
		t.Fatal(failure)
	}
	writeToken(t, path, "second")
	if source.current() != "first" {
		t.Error("read at once")
	}
	source.read = time.Now().Add(-tokenReadPause)
	if source.current() != "second" {
		t.Error("not read after a second")
	}
	writeToken(t, path, "")
	source.read = time.Time{}
	if source.current() != "second" {
		t.Error("an empty file took the token away")
	}
}
