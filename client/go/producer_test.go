package wald

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"wald.dev/client/go/waldv1"
)

// journal is a fake log that knows the repeats of its producer.
type journal struct {
	mutex   sync.Mutex
	applied []string
	sent    []uint64
	// The lowest epoch that the log takes, and the number of batches of earlier ones.
	epoch   uint64
	earlier int
}

// forget lets the log forget its producer.
func (j *journal) forget() {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	j.epoch++
	j.earlier = len(j.applied)
}

// apply appends a batch unless it is a repeat, and answers.
func (j *journal) apply(request *waldv1.AppendSessionRequest) (*waldv1.AppendSessionResponse, error) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	part := request.GetBatch().GetBatches()[0]
	producer := part.GetCondition().GetProducer()
	sequence := producer.GetSequence()
	j.sent = append(j.sent, sequence)
	if producer.GetEpoch() < j.epoch {
		facts := stated(NotApplied, Never)
		facts["first_epoch"] = fmt.Sprint(j.epoch)
		facts["request_id"] = fmt.Sprint(request.GetRequestId())
		return nil, refusal(codes.FailedPrecondition, ErrProducerExpired, facts)
	}
	known := uint64(len(j.applied) - j.earlier)
	if sequence > known {
		return nil, refusal(codes.Aborted, ErrProducerGap, stated(NotApplied, Never))
	}
	answer := ackOf(request, uint64(j.earlier)+sequence)
	if sequence < known {
		answer.Ack.Appends[0].Deduplicated = true
		return answer, nil
	}
	j.applied = append(j.applied, string(part.GetRecords()[0].GetData()))
	return answer, nil
}

// producing is a fake with one log, number 9, whose sessions go as `session` says.
func producing(session func(f *fake, j *journal, stream sessionStream, count int) error) (*fake, *journal) {
	f, j, streams := new(fake), new(journal), 0
	// A producer of a log that exists needs no right to create it.
	f.create = func(*waldv1.CreateLogRequest) (*waldv1.CreateLogResponse, error) {
		return nil, refusal(codes.PermissionDenied, ErrNotAllowed, stated(NotApplied, Never))
	}
	f.get = func(*waldv1.GetLogRequest) (*waldv1.GetLogResponse, error) {
		return &waldv1.GetLogResponse{Log: &waldv1.Log{LogId: 9}}, nil
	}
	f.session = func(stream sessionStream) error {
		j.mutex.Lock()
		streams++
		count := streams
		j.mutex.Unlock()
		return session(f, j, stream, count)
	}
	return f, j
}

// applyAll applies and acks at most count requests.
func applyAll(j *journal, stream sessionStream, count int) error {
	for range count {
		request, err := stream.Recv()
		if err != nil {
			return nil
		}
		answer, err := j.apply(request)
		if err != nil {
			return err
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
	return nil
}

const always = 1 << 30

func open(t *testing.T, f *fake, options ...ProducerOption) *Producer {
	t.Helper()
	producer, err := f.start(t).Producer(soon(t), "a", options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		producer.Close(ctx)
	})
	return producer
}

func produceAll(t *testing.T, producer *Producer, count int) []*Pending[LogAck] {
	t.Helper()
	var pending []*Pending[LogAck]
	for i := range count {
		sent, err := producer.Send(soon(t), []Record{Text(fmt.Sprint(i))})
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, sent)
	}
	return pending
}

func TestProducerKeepsToItsLogAndNumbersItsBatches(t *testing.T) {
	var got []*waldv1.AppendCondition
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		requests, err := receive(stream, 2)
		if err != nil {
			return err
		}
		for i, request := range requests {
			got = append(got, request.GetBatch().GetBatches()[0].GetCondition())
			if err := stream.Send(ackOf(request, uint64(i))); err != nil {
				return err
			}
		}
		return applyAll(j, stream, always)
	})
	_ = j
	producer := open(t, f, WithProducerID("p", 3), WithFirstSequence(5))
	produceAll(t, producer, 2)
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	for i, condition := range got {
		named := condition.GetProducer()
		if condition.GetLogId() != 9 || named.GetId() != "p" || named.GetEpoch() != 3 || named.GetSequence() != uint64(5+i) {
			t.Errorf("%d: got %v", i, condition)
		}
	}
	if producer.LogID() != 9 {
		t.Errorf("log id %d", producer.LogID())
	}
}

func TestProducerSendsEverythingUnackedAgainInOrder(t *testing.T) {
	f, j := producing(func(f *fake, j *journal, stream sessionStream, count int) error {
		switch count {
		case 1:
			// Applies three, acks one, and is gone.
			requests, err := receive(stream, 4)
			if err != nil {
				return err
			}
			for i, request := range requests[:3] {
				answer, _ := j.apply(request)
				if i == 0 {
					stream.Send(answer)
				}
			}
			f.listener.drop()
			return nil
		case 2:
			facts := stated(NotApplied, Safe)
			return refusal(codes.Unavailable, ErrStarting, facts)
		case 3:
			facts := stated(Unknown, SafeWithCondition)
			return refusal(codes.Internal, ErrJournalFailed, facts)
		}
		return applyAll(j, stream, always)
	})
	var interruptions []error
	producer := open(t, f, OnProducerInterruption(func(err error) { interruptions = append(interruptions, err) }))
	pending := produceAll(t, producer, 10)
	for i, sent := range pending {
		ack, err := sent.Wait(soon(t))
		if err != nil || ack.FirstLSN != LSN(i) {
			t.Errorf("%d: got %v, %v", i, ack, err)
		}
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if want := []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}; !slices.Equal(j.applied, want) {
		t.Errorf("the log has %v", j.applied)
	}
	if len(interruptions) != 3 || !errors.Is(interruptions[1], ErrStarting) || !errors.Is(interruptions[2], ErrJournalFailed) {
		t.Errorf("interrupted by %v", interruptions)
	}
}

func TestFatalFailureEndsTheProducer(t *testing.T) {
	facts := stated(NotApplied, Never)
	facts["request_id"] = "1"
	f, _ := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		answer, _ := j.apply(requests[0])
		stream.Send(answer)
		return refusal(codes.FailedPrecondition, ErrFenced, facts)
	})
	producer := open(t, f)
	failed := errorsOf(t, produceAll(t, producer, 3))
	if failed[0] != nil {
		t.Errorf("the first got %v", failed[0])
	}
	if !errors.Is(failed[1], ErrFenced) || errors.Is(failed[1], ErrEarlierFailure) || failed[1].Outcome != NotApplied {
		t.Errorf("the second got %#v", failed[1])
	}
	if !errors.Is(failed[2], ErrFenced) || !errors.Is(failed[2], ErrEarlierFailure) || failed[2].Outcome != NotApplied {
		t.Errorf("the third got %#v", failed[2])
	}
	if _, err := producer.Append(soon(t), []Record{Text("x")}); !errors.Is(err, ErrFenced) {
		t.Errorf("one more got %v", err)
	}
	if err := producer.Close(soon(t)); !errors.Is(err, ErrFenced) {
		t.Errorf("closed with %v", err)
	}
}

func TestFatalFailureAfterALostConnectionClaimsNothing(t *testing.T) {
	f, _ := producing(func(f *fake, j *journal, stream sessionStream, count int) error {
		if _, err := receive(stream, 1); err != nil {
			return err
		}
		if count == 1 {
			f.listener.drop()
			return nil
		}
		return refusal(codes.FailedPrecondition, ErrProducerFenced, stated(NotApplied, Never))
	})
	producer := open(t, f)
	_, err := producer.Append(soon(t), []Record{Text("x")})
	var e *Error
	if !errors.As(err, &e) || e.Reason != ErrProducerFenced || e.Outcome != Unknown {
		t.Errorf("got %#v", err)
	}
}

func TestDeliveryTimeoutEndsTheProducer(t *testing.T) {
	f, _ := producing(func(_ *fake, _ *journal, stream sessionStream, _ int) error {
		return refusal(codes.ResourceExhausted, ErrDiskFull, stated(NotApplied, Safe))
	})
	producer := open(t, f, WithDeliveryTimeout(200*time.Millisecond))
	_, err := producer.Append(soon(t), []Record{Text("x")})
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrDiskFull) {
		t.Errorf("got %v", err)
	}
	if _, err := producer.Send(soon(t), []Record{Text("x")}); !errors.Is(err, ErrEarlierFailure) {
		t.Errorf("one more got %v", err)
	}
}

func TestAckOnTimeKeepsTheProducerAlive(t *testing.T) {
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		return applyAll(j, stream, always)
	})
	const timeout = time.Second
	producer := open(t, f, WithDeliveryTimeout(timeout))
	for began, count := time.Now(), 0; time.Since(began) < timeout+timeout/5; count++ {
		if ack, err := producer.Append(soon(t), []Record{Text("x")}); err != nil || ack.FirstLSN != LSN(count) {
			t.Fatalf("got %v, %v", ack, err)
		}
	}
	if len(j.applied) == 0 {
		t.Error("nothing was applied")
	}
}

func TestQueueBehindSteadyAcksKeepsTheProducerAlive(t *testing.T) {
	const timeout, batches = 2 * time.Second, 12
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		for range time.Tick(timeout / 10) {
			if err := applyAll(j, stream, 1); err != nil || stream.Context().Err() != nil {
				return err
			}
		}
		return nil
	})
	// The last batch waits for longer than the timeout.
	for i, sent := range produceAll(t, open(t, f, WithDeliveryTimeout(timeout)), batches) {
		if ack, err := sent.Wait(soon(t)); err != nil || ack.FirstLSN != LSN(i) {
			t.Errorf("%d: got %v, %v", i, ack, err)
		}
	}
	if len(j.applied) != batches {
		t.Errorf("the log has %v", j.applied)
	}
}

func TestProducerLeavesASilentStreamForAnother(t *testing.T) {
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, count int) error {
		if count > 1 {
			return applyAll(j, stream, always)
		}
		// Applies all, acks nothing.
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		for _, request := range requests {
			j.apply(request)
		}
		<-stream.Context().Done()
		return nil
	})
	var interruptions []error
	producer := open(t, f, WithDeliveryTimeout(2*time.Second),
		OnProducerInterruption(func(err error) { interruptions = append(interruptions, err) }))
	for i, sent := range produceAll(t, producer, 3) {
		if ack, err := sent.Wait(soon(t)); err != nil || ack.FirstLSN != LSN(i) || !ack.Deduplicated {
			t.Errorf("%d: got %v, %v", i, ack, err)
		}
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if want := []string{"0", "1", "2"}; !slices.Equal(j.applied, want) {
		t.Errorf("the log has %v", j.applied)
	}
	if len(interruptions) != 1 || !strings.Contains(interruptions[0].Error(), "no ack for 1s") {
		t.Errorf("interrupted by %v", interruptions)
	}
}

func TestSilenceOfAStreamCountsOnlyWhileABatchIsDue(t *testing.T) {
	f, _ := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		applyAll(j, stream, 1)
		<-stream.Context().Done()
		return nil
	})
	producer := open(t, f)
	if _, err := producer.Append(soon(t), []Record{Text("x")}); err != nil {
		t.Fatal(err)
	}
	// Stop reports whether the timer runs.
	expectTimer := func(runs bool) {
		t.Helper()
		producer.mutex.Lock()
		defer producer.mutex.Unlock()
		if producer.silence.Stop() != runs {
			t.Errorf("the timer runs: %v", !runs)
		}
	}
	expectTimer(false)
	produceAll(t, producer, 1)
	expectTimer(true)
}

func TestCloseDoesNotWaitForAServerThatNeverEndsTheStream(t *testing.T) {
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		applyAll(j, stream, always)
		<-stream.Context().Done()
		return nil
	})
	producer := open(t, f)
	for _, pending := range produceAll(t, producer, 3) {
		if _, err := pending.Wait(soon(t)); err != nil {
			t.Fatal(err)
		}
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	if len(j.applied) != 3 {
		t.Errorf("applied %v", j.applied)
	}
}

func TestProducerOutlivesARefusalThatComesWhileNothingIsDue(t *testing.T) {
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, count int) error {
		if count > 1 {
			return applyAll(j, stream, always)
		}
		applyAll(j, stream, 1)
		return refusal(codes.Unauthenticated, ErrBadCredential, stated(NotApplied, Never))
	})
	streams := make(chan context.Context, 2)
	client := f.start(t, WithGRPC(grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn,
		method string, open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
		streams <- ctx
		return open(ctx, desc, conn, method, options...)
	})))
	producer, err := client.Producer(soon(t), "a")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if ack, err := producer.Append(soon(t), []Record{Text("x")}); err != nil || ack.FirstLSN != LSN(i) {
			t.Fatalf("%d: got %v, %v", i, ack, err)
		}
		if i == 0 {
			// The producer has seen the refusal.
			<-(<-streams).Done()
		}
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if len(j.applied) != 2 {
		t.Errorf("the log has %v", j.applied)
	}
}

func TestProducerHoldsBackWhatIsTooMuch(t *testing.T) {
	goOn := make(chan struct{})
	f, _ := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		<-goOn
		return applyAll(j, stream, always)
	})
	producer := open(t, f, WithInFlight(2, 1<<20))
	produceAll(t, producer, 2)
	full, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := producer.Send(full, []Record{Text("x")}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(goOn)
	produceAll(t, producer, 5)
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if _, err := producer.Send(soon(t), []Record{Text("x")}); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := producer.client.Producer(soon(t), "a", WithInFlight(recognisedBatches+1, 1)); err == nil {
		t.Error("more in flight than the server recognises")
	}
}

func TestProducerCreatesALogOnlyIfThereIsNone(t *testing.T) {
	// The log, in the order of the questions; 0: none.
	for _, test := range []struct {
		found   []uint64
		created uint64
		calls   string
		logID   uint64
	}{
		{[]uint64{9}, 0, "get", 9},
		{[]uint64{0}, 11, "get create", 11},
		// Another client creates it, and deletes it again.
		{[]uint64{0, 9}, 0, "get create get", 9},
		{[]uint64{0, 0}, 11, "get create get create", 11},
	} {
		f, _ := producing(func(*fake, *journal, sessionStream, int) error { return nil })
		var calls []string
		f.get = func(*waldv1.GetLogRequest) (*waldv1.GetLogResponse, error) {
			id := test.found[0]
			calls, test.found = append(calls, "get"), test.found[1:]
			if id == 0 {
				return nil, refusal(codes.NotFound, ErrLogNotFound, nil)
			}
			return &waldv1.GetLogResponse{Log: &waldv1.Log{LogId: id}}, nil
		}
		f.create = func(*waldv1.CreateLogRequest) (*waldv1.CreateLogResponse, error) {
			calls = append(calls, "create")
			if len(test.found) > 0 {
				return nil, refusal(codes.AlreadyExists, ErrLogExists, stated(NotApplied, Never))
			}
			return &waldv1.CreateLogResponse{Log: &waldv1.Log{LogId: test.created}}, nil
		}
		producer := open(t, f)
		if got := strings.Join(calls, " "); got != test.calls || producer.LogID() != test.logID {
			t.Errorf("log %d after %q, not %d after %q", producer.LogID(), got, test.logID, test.calls)
		}
	}
}

func TestProducerReportsAQuotaAtOnce(t *testing.T) {
	f, _ := producing(func(_ *fake, _ *journal, stream sessionStream, count int) error {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		return refusal(codes.ResourceExhausted, ErrQuota, stated(NotApplied, Safe))
	})
	client := f.start(t)
	producer, err := client.Producer(soon(t), "log", WithProducerID("p", 0))
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_, err = producer.Append(soon(t), []Record{Text("a")})
	var e *Error
	if !errors.As(err, &e) || e.Reason != ErrQuota || e.Outcome != NotApplied {
		t.Fatalf("got %v", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Fatalf("reported after %v", took)
	}
}

func TestRandomIDBeginsAtTheLowestEpochAndIsForgotten(t *testing.T) {
	f, _ := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return nil
			}
			answer, err := j.apply(request)
			if err != nil {
				return err
			}
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
	})
	f.get = func(*waldv1.GetLogRequest) (*waldv1.GetLogResponse, error) {
		return &waldv1.GetLogResponse{Log: &waldv1.Log{LogId: 9, FirstProducerEpoch: 7}}, nil
	}
	var forgotten []string
	f.forget = func(r *waldv1.ForgetProducerRequest) (*waldv1.ForgetProducerResponse, error) {
		if r.GetLogId() != 9 {
			t.Errorf("forgets in log %d", r.GetLogId())
		}
		forgotten = append(forgotten, r.GetProducerId())
		return new(waldv1.ForgetProducerResponse), nil
	}
	client := f.start(t)
	var drawn string
	for index, options := range [][]ProducerOption{nil, {WithProducerLogID(9)}, {WithProducerID("p", 0)}} {
		producer, err := client.Producer(soon(t), "log", options...)
		if err != nil {
			t.Fatal(err)
		}
		if want := []uint64{7, 7, 0}[index]; producer.Epoch() != want {
			t.Errorf("epoch %d, not %d", producer.Epoch(), want)
		}
		if index == 0 {
			drawn = producer.ID()
			if _, err := producer.Append(soon(t), []Record{Text("a")}); err != nil {
				t.Fatal(err)
			}
		}
		if err := producer.Close(soon(t)); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(forgotten, []string{drawn}) {
		t.Fatalf("forgot %q, not %q", forgotten, drawn)
	}
}

func TestProducerSendsAgainTheRecordsThatItWasGiven(t *testing.T) {
	arrived, changed := make(chan struct{}), make(chan struct{})
	f, j := producing(func(f *fake, j *journal, stream sessionStream, count int) error {
		if count > 1 {
			return applyAll(j, stream, always)
		}
		if _, err := receive(stream, 1); err != nil {
			return err
		}
		close(arrived)
		<-changed
		f.listener.drop()
		return nil
	})
	producer, data := open(t, f), []byte("first")
	if _, err := producer.Send(soon(t), []Record{Bytes(data)}); err != nil {
		t.Fatal(err)
	}
	<-arrived
	copy(data, "XXXXX")
	close(changed)
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(j.applied, []string{"first"}) {
		t.Errorf("the log has %v", j.applied)
	}
}

func TestProducerRefusesABatchThatCannotBeEncodedAlone(t *testing.T) {
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		return applyAll(j, stream, always)
	})
	producer := open(t, f)
	for i := range 2 {
		if _, err := producer.Send(soon(t), []Record{Text(fmt.Sprint(i))}); err != nil {
			t.Fatal(err)
		}
		_, err := producer.Send(soon(t), []Record{unencodable})
		expectUnencodable(t, err)
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	// The refused batches have no number.
	if !slices.Equal(j.applied, []string{"0", "1"}) || !slices.Equal(j.sent, []uint64{0, 1}) {
		t.Errorf("the log has %v, sent as %v", j.applied, j.sent)
	}
}
