package wald

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"wald.dev/client/go/waldv1"
)

type sessionStream = waldv1.WalService_AppendSessionServer

// ackOf answers a request of one log with as many records as it has, from this lsn on.
func ackOf(request *waldv1.AppendSessionRequest, lsn uint64) *waldv1.AppendSessionResponse {
	part := request.GetBatch().GetBatches()[0]
	next := lsn + uint64(len(part.GetRecords()))
	return &waldv1.AppendSessionResponse{
		RequestId: request.GetRequestId(),
		Ack: &waldv1.AppendBatchResponse{Appends: []*waldv1.LogAppend{
			{Log: part.GetLog(), FirstLsn: &lsn, NextLsn: &next},
		}},
	}
}

// ackAll acks requests as they come, until the client is done.
func ackAll(stream sessionStream, lsn uint64) error {
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(ackOf(request, lsn)); err != nil {
			return err
		}
		lsn++
	}
}

// receive takes count requests.
func receive(stream sessionStream, count int) ([]*waldv1.AppendSessionRequest, error) {
	var requests []*waldv1.AppendSessionRequest
	for range count {
		request, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		requests = append(requests, request)
	}
	return requests, nil
}

func oneRecord(data string) Batch {
	return Batch{Logs: []LogBatch{{Log: "a", Records: []Record{Text(data)}}}}
}

// sendThree sends three batches and closes for sending.
func sendThree(t *testing.T, client *Client) ([]*Pending[BatchAck], error) {
	t.Helper()
	session, err := client.Session(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(session.Close)
	var pending []*Pending[BatchAck]
	for range 3 {
		sent, err := session.Send(soon(t), oneRecord("x"))
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, sent)
	}
	return pending, session.CloseSend(soon(t))
}

// errorsOf waits for the answers; nil where there is an ack.
func errorsOf[A any](t *testing.T, pending []*Pending[A]) []*Error {
	t.Helper()
	list := make([]*Error, len(pending))
	for i, sent := range pending {
		if _, err := sent.Wait(soon(t)); err != nil && !errors.As(err, &list[i]) {
			t.Fatal(err)
		}
	}
	return list
}

func TestSessionAcksInOrder(t *testing.T) {
	f := &fake{session: func(stream sessionStream) error { return ackAll(stream, 5) }}
	pending, err := sendThree(t, f.start(t))
	if err != nil {
		t.Fatal(err)
	}
	for i, sent := range pending {
		ack, err := sent.Wait(soon(t))
		if err != nil || ack.Appends[0].FirstLSN != LSN(5+i) {
			t.Errorf("%d: got %v, %v", i, ack, err)
		}
	}
}

func TestSessionEndsAtTheFirstFailure(t *testing.T) {
	facts := stated(NotApplied, Never)
	facts["request_id"] = "1"
	f := &fake{session: func(stream sessionStream) error {
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		if err := stream.Send(ackOf(requests[0], 0)); err != nil {
			return err
		}
		return refusal(codes.FailedPrecondition, ErrPositionMismatch, facts)
	}}
	pending, err := sendThree(t, f.start(t))
	if !errors.Is(err, ErrPositionMismatch) {
		t.Errorf("the session ended with %v", err)
	}
	failed := errorsOf(t, pending)
	if failed[0] != nil {
		t.Errorf("the first got %v", failed[0])
	}
	if !errors.Is(failed[1], ErrPositionMismatch) || failed[1].Outcome != NotApplied {
		t.Errorf("the second got %v", failed[1])
	}
	third := failed[2]
	if third.Outcome != NotApplied || third.Retry != Safe || !errors.Is(third, ErrEarlierFailure) || errors.Is(third, ErrPositionMismatch) {
		t.Errorf("the third got %#v", third)
	}
}

func TestWhatFollowsAnUnknownRequestIsUnknown(t *testing.T) {
	facts := stated(Unknown, SafeWithCondition)
	facts["request_id"] = "0"
	f := &fake{session: func(stream sessionStream) error {
		if _, err := receive(stream, 3); err != nil {
			return err
		}
		return refusal(codes.Internal, ErrJournalFailed, facts)
	}}
	pending, _ := sendThree(t, f.start(t))
	for i, e := range errorsOf(t, pending) {
		if e.Outcome != Unknown || e.Retry != SafeWithCondition {
			t.Errorf("%d: got %s, %s", i, e.Outcome, e.Retry)
		}
	}
}

func TestSessionThatLosesItsConnectionKnowsNothing(t *testing.T) {
	f := new(fake)
	var streams atomic.Int32
	f.session = func(stream sessionStream) error {
		streams.Add(1)
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		stream.Send(ackOf(requests[0], 0))
		f.listener.drop()
		return nil
	}
	pending, err := sendThree(t, f.start(t))
	if err == nil {
		t.Error("the session ended well")
	}
	// Whether the ack came through before the connection broke is open.
	for i, e := range errorsOf(t, pending)[1:] {
		if e == nil || e.Outcome != Unknown || e.Retry != SafeWithCondition || e.Reason != "" {
			t.Errorf("%d: got %#v", i+1, e)
		}
	}
	if streams.Load() != 1 {
		t.Errorf("%d streams: a session repeats nothing", streams.Load())
	}
}

func TestSendBlocksWhileTheWindowIsFull(t *testing.T) {
	goOn := make(chan struct{})
	f := &fake{session: func(stream sessionStream) error {
		<-goOn
		return ackAll(stream, 0)
	}}
	session, err := f.start(t).Session(soon(t), WithWindow(100))
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	large := oneRecord(string(make([]byte, 1000)))
	if _, err := session.Send(soon(t), large); err != nil {
		t.Fatalf("one is let through: %v", err)
	}
	full, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err = session.Send(full, oneRecord("x"))
	var e *Error
	if !errors.As(err, &e) || e.Outcome != NotApplied || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(goOn)
	if _, err := session.Send(soon(t), oneRecord("x")); err != nil {
		t.Error(err)
	}
	if err := session.CloseSend(soon(t)); err != nil {
		t.Error(err)
	}
	if _, err := session.Send(soon(t), oneRecord("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
}

func TestSessionCopiesBatchesInSend(t *testing.T) {
	goOn, got := make(chan struct{}), make(chan []*waldv1.Record, 1)
	f := &fake{
		// A small window that does not grow: the first two batches hold up the third in the client.
		options: []grpc.ServerOption{grpc.InitialWindowSize(64 << 10)},
		session: func(stream sessionStream) error {
			<-goOn
			requests, err := receive(stream, 3)
			if err != nil {
				return err
			}
			got <- requests[2].GetBatch().GetBatches()[0].GetRecords()
			for i, request := range requests {
				if err := stream.Send(ackOf(request, uint64(i))); err != nil {
					return err
				}
			}
			return nil
		},
	}
	session, err := f.start(t).Session(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	for range 2 {
		if _, err := session.Send(soon(t), oneRecord(string(make([]byte, 1<<20)))); err != nil {
			t.Fatal(err)
		}
	}
	data, value := []byte("data"), []byte("value")
	record := Record{Data: data, Headers: []Header{{Key: "k", Value: value}}}.WithChecksum()
	batch := Batch{Logs: []LogBatch{{Log: "a", Records: []Record{record}}}}
	if _, err := session.Send(soon(t), batch); err != nil {
		t.Fatal(err)
	}
	sum := *record.CRC32C
	*record.CRC32C = 0
	copy(data, "XXXX")
	copy(value, "XXXXX")
	close(goOn)
	if err := session.CloseSend(soon(t)); err != nil {
		t.Fatal(err)
	}
	one := (<-got)[0]
	if string(one.GetData()) != "data" || string(one.GetHeaders()[0].GetValue()) != "value" || one.GetCrc32C() != sum {
		t.Errorf("got %v", one)
	}
}

// unencodable is a record with a header key that is not UTF-8.
var unencodable = Record{Data: []byte("x"), Headers: []Header{{Key: "\xff"}}}

// expectUnencodable checks the refusal of a batch that cannot be encoded.
func expectUnencodable(t *testing.T, err error) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Code != codes.InvalidArgument || e.Outcome != NotApplied || e.Retry != Never {
		t.Errorf("got %#v", err)
	}
}

func TestSessionRefusesABatchThatCannotBeEncodedAlone(t *testing.T) {
	f := &fake{session: func(stream sessionStream) error { return ackAll(stream, 0) }}
	session, err := f.start(t).Session(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	var pending []*Pending[BatchAck]
	for range 2 {
		sent, err := session.Send(soon(t), oneRecord("x"))
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, sent)
		_, err = session.Send(soon(t), Batch{Logs: []LogBatch{{Log: "a", Records: []Record{unencodable}}}})
		expectUnencodable(t, err)
	}
	if err := session.CloseSend(soon(t)); err != nil {
		t.Fatal(err)
	}
	for i, sent := range pending {
		if ack, err := sent.Wait(soon(t)); err != nil || ack.Appends[0].FirstLSN != LSN(i) {
			t.Errorf("%d: got %v, %v", i, ack, err)
		}
	}
}
