package wald

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"wald.dev/client/go/waldv1"
)

type scanStream = waldv1.WalService_ScanServer

// messageOf has one record of log "a", and the cursor after it.
func messageOf(lsn uint64, cursor string) *waldv1.ScanResponse {
	return &waldv1.ScanResponse{
		Batches: []*waldv1.RecordBatch{{Log: "a", FirstLsn: &lsn, Records: []*waldv1.Record{{}}}},
		Cursor:  []byte(cursor),
	}
}

// scanning is a fake that answers its scans with these functions in turn; it keeps the
// requests.
func scanning(scans ...func(*fake, scanStream) error) (*fake, *[]*waldv1.ScanRequest) {
	f, asked := new(fake), new([]*waldv1.ScanRequest)
	f.scan = func(request *waldv1.ScanRequest, stream scanStream) error {
		*asked = append(*asked, request)
		if len(*asked) > len(scans) {
			return refusal(codes.InvalidArgument, ErrInvalidScan, nil)
		}
		return scans[len(*asked)-1](f, stream)
	}
	return f, asked
}

func send(messages ...*waldv1.ScanResponse) func(*fake, scanStream) error {
	return func(_ *fake, stream scanStream) error {
		for _, message := range messages {
			if err := stream.Send(message); err != nil {
				return err
			}
		}
		return nil
	}
}

// collect takes events to the end.
func collect(t *testing.T, scanner *Scanner) (lsns []LSN, err error) {
	t.Helper()
	t.Cleanup(scanner.Close)
	for scanner.Next(soon(t)) {
		for _, record := range scanner.Event().Records() {
			lsns = append(lsns, record.LSN)
		}
	}
	return lsns, scanner.Err()
}

func TestFollowerResumesByItsCursorAndDeliversNothingTwice(t *testing.T) {
	f, asked := scanning(
		func(_ *fake, stream scanStream) error {
			stream.Send(messageOf(0, "one"))
			stream.Send(&waldv1.ScanResponse{Cursor: []byte("heartbeat")})
			return refusal(codes.Unavailable, ErrDraining, nil)
		},
		func(*fake, scanStream) error { return refusal(codes.Unavailable, ErrStarting, nil) },
		send(messageOf(1, "two")), // and a good end, which a follower does not believe
		func(f *fake, stream scanStream) error {
			stream.Send(messageOf(2, "three"))
			return refusal(codes.DataLoss, ErrQuarantined, nil)
		},
	)
	interruptions := 0
	follower := f.start(t).Follow(context.Background(), Log("a"), FromLSN(0),
		OnInterruption(func(error) { interruptions++ }))
	lsns, err := collect(t, &follower.Scanner)
	var e *Error
	if !errors.As(err, &e) || e.Reason != ErrQuarantined || e.Outcome != NotApplied {
		t.Errorf("ended with %#v", err)
	}
	if !slices.Equal(lsns, []LSN{0, 1, 2}) || string(follower.Cursor()) != "three" || interruptions != 3 {
		t.Errorf("got %v, cursor %s, %d interruptions", lsns, follower.Cursor(), interruptions)
	}
	var cursors []string
	for _, request := range *asked {
		cursors = append(cursors, string(request.GetCursor()))
	}
	if got := strings.Join(cursors, " "); got != " heartbeat heartbeat two" {
		t.Errorf("resumed at %q", got)
	}
}

func TestFollowerThatGotOnlyHeartbeatsBeginsAgainAtItsStart(t *testing.T) {
	f, asked := scanning(
		func(_ *fake, stream scanStream) error {
			stream.Send(&waldv1.ScanResponse{RecoveryEpoch: 1})
			return refusal(codes.Unavailable, ErrDraining, nil)
		},
		send(messageOf(4, "five")),
	)
	follower := f.start(t).Follow(context.Background(), Log("a"), FromLSN(4))
	if lsns, err := collect(t, &follower.Scanner); !slices.Equal(lsns, []LSN{4}) || !errors.Is(err, ErrInvalidScan) {
		t.Errorf("got %v, %v", lsns, err)
	}
	if got := *asked; len(got) != 3 || got[0].GetLsn() != 4 || got[1].GetLsn() != 4 || string(got[2].GetCursor()) != "five" {
		t.Errorf("asked %v", got)
	}
}

func TestFollowerGivesUpASilentConnection(t *testing.T) {
	f := &fake{scan: func(request *waldv1.ScanRequest, stream scanStream) error {
		switch string(request.GetCursor()) {
		case "":
			stream.Send(messageOf(0, "one"))
			<-stream.Context().Done()
			return nil
		case "one":
			return stream.Send(messageOf(1, "two"))
		}
		return refusal(codes.DataLoss, ErrQuarantined, nil)
	}}
	var silence error
	client := f.start(t, WithSilenceTimeout(100*time.Millisecond))
	follower := client.Follow(context.Background(), Log("a"),
		OnInterruption(func(err error) { silence = errors.Join(silence, err) }))
	lsns, err := collect(t, &follower.Scanner)
	if !slices.Equal(lsns, []LSN{0, 1}) || !errors.Is(err, ErrQuarantined) {
		t.Errorf("got %v, %v", lsns, err)
	}
	if !strings.Contains(silence.Error(), "nothing came for 100ms") {
		t.Errorf("interrupted by %v", silence)
	}
}

// frozen is a stream of a process that is frozen after the first message, until the stream is cancelled.
type frozen struct {
	grpc.ClientStream
	thawed bool
}

func (f *frozen) RecvMsg(message any) error {
	err := f.ClientStream.RecvMsg(message)
	if !f.thawed {
		f.thawed = true
		<-f.Context().Done()
	}
	return err
}

func TestFollowerGoesOnAfterItsProcessWasFrozen(t *testing.T) {
	for _, first := range []*waldv1.ScanResponse{{Cursor: []byte("one")}, messageOf(0, "one")} {
		f, asked := scanning(func(_ *fake, stream scanStream) error {
			stream.Send(first)
			<-stream.Context().Done()
			return nil
		}, send(messageOf(1, "two")))
		streams := 0
		freeze := WithGRPC(grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn,
			method string, open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
			stream, err := open(ctx, desc, conn, method, options...)
			if streams++; err != nil || streams > 1 {
				return stream, err
			}
			return &frozen{ClientStream: stream}, nil
		}))
		client := f.start(t, freeze, WithSilenceTimeout(100*time.Millisecond))
		var interruptions []string
		follower := client.Follow(context.Background(), Log("a"),
			OnInterruption(func(err error) { interruptions = append(interruptions, err.Error()) }))
		want := []LSN{1}
		if len(first.GetBatches()) > 0 {
			want = []LSN{0, 1}
		}
		lsns, err := collect(t, &follower.Scanner)
		if !slices.Equal(lsns, want) || !errors.Is(err, ErrInvalidScan) {
			t.Errorf("got %v, %v", lsns, err)
		}
		if len(*asked) != 3 || string((*asked)[1].GetCursor()) != "one" {
			t.Errorf("asked %v", *asked)
		}
		if len(interruptions) == 0 || !strings.Contains(interruptions[0], "nothing came for 100ms") {
			t.Errorf("interrupted by %v", interruptions)
		}
	}
}

func TestTailIsPinnedBeforeItIsFollowed(t *testing.T) {
	f, asked := scanning(func(*fake, scanStream) error { return refusal(codes.OutOfRange, ErrBeyondTail, nil) })
	f.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		return &waldv1.GetTailResponse{FirstLsn: new(uint64(4)), TailLsn: new(uint64(10))}, nil
	}
	client := f.start(t)
	for offset, want := range map[uint64]uint64{0: 10, 3: 7, 6: 4, 99: 4} {
		*asked = nil
		follower := client.Follow(context.Background(), Log("a"), Last(offset))
		collect(t, &follower.Scanner)
		if got := (*asked)[0].GetLsn(); got != want {
			t.Errorf("%d before the tail is %d, want %d", offset, got, want)
		}
	}
}

func TestFollowerOfAnyNodeLeavesTheTailToTheNode(t *testing.T) {
	f, asked := scanning(send(messageOf(7, "x")))
	f.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		t.Error("the owner was asked for its tail")
		return &waldv1.GetTailResponse{FirstLsn: new(uint64(4)), TailLsn: new(uint64(10))}, nil
	}
	follower := f.start(t).Follow(context.Background(), Log("a"), Last(3), AnyNode())
	if lsns, _ := collect(t, &follower.Scanner); !slices.Equal(lsns, []LSN{7}) {
		t.Errorf("got %v", lsns)
	}
	if _, offset := (*asked)[0].GetStart().(*waldv1.ScanRequest_TailOffset); !offset || (*asked)[0].GetTailOffset() != 3 {
		t.Errorf("asked %v", (*asked)[0])
	}
}

func TestFollowerThatCannotKnowWhereItWasGivesUp(t *testing.T) {
	f, asked := scanning(func(_ *fake, stream scanStream) error {
		// The scan is open: from here on records count, but none has come yet.
		stream.SendHeader(nil)
		return refusal(codes.Unavailable, ErrDraining, nil)
	}, send(messageOf(7, "x")))
	follower := f.start(t).Follow(context.Background(), AllLogs(), FromNow())
	if lsns, err := collect(t, &follower.Scanner); !errors.Is(err, ErrDraining) || len(lsns) > 0 {
		t.Errorf("got %v, %v", lsns, err)
	}
	if len(*asked) != 1 {
		t.Errorf("asked %d times", len(*asked))
	}
}

func TestFollowerFromNowGivesUpAStreamThatEndedWithoutACursor(t *testing.T) {
	f, asked := scanning(send(&waldv1.ScanResponse{RecoveryEpoch: 1}), send(messageOf(7, "x")))
	follower := f.start(t).Follow(context.Background(), AllLogs(), FromNow())
	if lsns, err := collect(t, &follower.Scanner); err == nil || len(lsns) > 0 {
		t.Errorf("got %v, %v", lsns, err)
	}
	if len(*asked) != 1 {
		t.Errorf("asked %d times", len(*asked))
	}
}

func TestFollowerThatWasRefusedBeginsAgainAtTheTail(t *testing.T) {
	f, asked := scanning(func(*fake, scanStream) error {
		return refusal(codes.Unavailable, ErrStarting, nil)
	}, send(messageOf(7, "x")))
	follower := f.start(t).Follow(context.Background(), AllLogs(), FromNow())
	if lsns, _ := collect(t, &follower.Scanner); !slices.Equal(lsns, []LSN{7}) {
		t.Errorf("got %v", lsns)
	}
	if _, offset := (*asked)[1].GetStart().(*waldv1.ScanRequest_TailOffset); !offset {
		t.Errorf("asked %v", (*asked)[1])
	}
}

func TestBoundedScanAsksForWhatIsLeft(t *testing.T) {
	f, asked := scanning(
		func(_ *fake, stream scanStream) error {
			stream.Send(messageOf(0, "one"))
			return refusal(codes.Unavailable, ErrDraining, nil)
		},
		send(messageOf(1, "two")),
	)
	scanner := f.start(t).Scan(context.Background(), Log("a"), MaxRecords(2))
	lsns, err := collect(t, scanner)
	if err != nil || !slices.Equal(lsns, []LSN{0, 1}) {
		t.Errorf("got %v, %v", lsns, err)
	}
	if len(*asked) != 2 || (*asked)[1].GetMaxRecords() != 1 {
		t.Errorf("asked %v", *asked)
	}
}

func TestNextGoesOnAfterItsContextEnded(t *testing.T) {
	goOn := make(chan struct{})
	f, _ := scanning(func(_ *fake, stream scanStream) error {
		<-goOn
		return stream.Send(messageOf(0, "one"))
	})
	scanner := f.start(t).Scan(context.Background(), Log("a"))
	t.Cleanup(scanner.Close)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if scanner.Next(ended) || !errors.Is(scanner.Err(), context.Canceled) {
		t.Errorf("got %v", scanner.Err())
	}
	close(goOn)
	if lsns, err := collect(t, scanner); err != nil || len(lsns) != 1 {
		t.Errorf("got %v, %v", lsns, err)
	}
}
