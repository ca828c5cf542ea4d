package wald

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

const (
	producerKind = waldv1.StateKind_STATE_KIND_PRODUCER
	followerKind = waldv1.StateKind_STATE_KIND_FOLLOWER
)

// memoryState is a state in memory, which the next start of the program finds.
type memoryState struct {
	mutex sync.Mutex
	saved []byte
	saves int
	fails error
	// Runs within each save.
	saving func()
}

func (m *memoryState) Load() ([]byte, error) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return m.saved, nil
}

func (m *memoryState) Save(state []byte) error {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if m.fails != nil {
		return m.fails
	}
	if m.saving != nil {
		m.saving()
	}
	m.saved = slices.Clone(state)
	m.saves++
	return nil
}

func (m *memoryState) failWith(err error) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.fails = err
}

// producer decodes the state with the generated message.
func (m *memoryState) producer(t *testing.T) *waldv1.ProducerState {
	state := new(waldv1.ProducerState)
	saved, _ := m.Load()
	if err := proto.Unmarshal(saved, state); err != nil {
		t.Error(err)
	}
	return state
}

func openDurable(t *testing.T, client *Client, state State, options ...ProducerOption) *DurableProducer {
	t.Helper()
	producer, err := client.DurableProducer(soon(t), "a", state, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(producer.abort)
	return producer
}

// appendAll appends one batch per number.
func appendAll(t *testing.T, producer *DurableProducer, from, to uint64) {
	t.Helper()
	for number := from; number < to; number++ {
		sequence, err := producer.AppendBatch(soon(t), Text(fmt.Sprint(number)))
		if err != nil || sequence != number {
			t.Fatalf("appended %d as %d: %v", number, sequence, err)
		}
	}
}

func numbersTo(count int) []string {
	list := make([]string, count)
	for i := range list {
		list[i] = fmt.Sprint(i)
	}
	return list
}

func acking(_ *fake, j *journal, stream sessionStream, _ int) error {
	return applyAll(j, stream, always)
}

func TestBatchesWithoutAnAckAreSentAgainByTheNextStart(t *testing.T) {
	const lives = 10
	arrived := make(chan struct{})
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, count int) error {
		if count > lives {
			return applyAll(j, stream, always)
		}
		// The program ends before it sees the acks of the last two batches.
		if err := applyAll(j, stream, 2); err != nil {
			return err
		}
		requests, err := receive(stream, 2)
		if err != nil {
			return err
		}
		for _, request := range requests {
			if _, err := j.apply(request); err != nil {
				return err
			}
		}
		arrived <- struct{}{}
		<-stream.Context().Done()
		return nil
	})
	client, state := f.start(t), new(memoryState)
	var id string
	for life := range uint64(lives) {
		producer := openDurable(t, client, state)
		if producer.NextSequence() != 5*life || life > 0 && producer.ID() != id {
			t.Fatalf("life %d begins at %d as %s", life, producer.NextSequence(), producer.ID())
		}
		id = producer.ID()
		appendAll(t, producer, 5*life, 5*life+5)
		<-arrived
		producer.abort()
	}
	if len(state.producer(t).GetBatches()) == 0 {
		t.Error("every batch was acked")
	}
	producer := openDurable(t, client, state)
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(j.applied, numbersTo(5*lives)) || len(j.sent) <= 5*lives {
		t.Errorf("the log has %v, sent as %v", j.applied, j.sent)
	}
	if left := state.producer(t); left.GetSequence() != 5*lives || len(left.GetBatches()) > 0 || left.GetId() != id {
		t.Errorf("left %v", left)
	}
}

func TestStateIsSavedBeforeTheFirstBatchAndBeforeEachBatch(t *testing.T) {
	state := new(memoryState)
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return nil
			}
			producer := request.GetBatch().GetBatches()[0].GetCondition().GetProducer()
			saved := state.producer(t)
			next := saved.GetSequence() + uint64(len(saved.GetBatches()))
			if saved.GetId() != producer.GetId() || next <= producer.GetSequence() || len(saved.GetBatches()) > batchesKept {
				t.Errorf("batch %d came before it was saved: %v", producer.GetSequence(), saved)
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
	f.forget = func(*waldv1.ForgetProducerRequest) (*waldv1.ForgetProducerResponse, error) {
		t.Error("the server forgets the id")
		return new(waldv1.ForgetProducerResponse), nil
	}
	producer := openDurable(t, f.start(t), state)
	want := &waldv1.ProducerState{Log: "a", LogId: 9, Id: producer.ID(), Epoch: 7, Kind: producerKind}
	if saved := state.producer(t); !proto.Equal(saved, want) || producer.ID() == "" || producer.LogID() != 9 {
		t.Errorf("saved %v", saved)
	}
	appendAll(t, producer, 0, 200)
	if err := producer.Flush(soon(t)); err != nil {
		t.Fatal(err)
	}
	want.Sequence = 200
	if saved := state.producer(t); !proto.Equal(saved, want) {
		t.Errorf("saved %v", saved)
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	saves := state.saves
	_, err := producer.AppendBatch(soon(t), Text("x"))
	if flushed := producer.Flush(soon(t)); !errors.Is(err, ErrClosed) || !errors.Is(flushed, ErrClosed) {
		t.Errorf("after Close: %v, %v", err, flushed)
	}
	if err := producer.Close(soon(t)); err != nil || state.saves != saves {
		t.Errorf("closed twice: %v, %d saves", err, state.saves-saves)
	}
	if !slices.Equal(j.applied, numbersTo(200)) {
		t.Errorf("the log has %v", j.applied)
	}
}

func TestStateHasTheBytesOfProducerState(t *testing.T) {
	f, _ := producing(func(_ *fake, _ *journal, stream sessionStream, _ int) error {
		<-stream.Context().Done()
		return nil
	})
	state := new(memoryState)
	producer := openDurable(t, f.start(t), state, WithProducerID("p", 3), WithFirstSequence(5))
	data := []byte("first")
	record := Record{Data: data, Headers: []Header{{Key: "k", Value: []byte("v")}}, Time: time.UnixMicro(7)}.WithChecksum()
	if sequence, err := producer.AppendBatch(soon(t), record, Text("second")); err != nil || sequence != 5 {
		t.Fatal(sequence, err)
	}
	// The caller may use the slice again.
	copy(data, "XXXXX")
	if _, err := producer.AppendBatch(soon(t), Text("third")); err != nil {
		t.Fatal(err)
	}
	payload := func(data string) *waldv1.Record_Data { return &waldv1.Record_Data{Data: []byte(data)} }
	want, err := proto.Marshal(&waldv1.ProducerState{
		Log: "a", LogId: 9, Id: "p", Epoch: 3, Sequence: 5, Kind: producerKind,
		Batches: []*waldv1.LogBatch{
			{Records: []*waldv1.Record{
				{
					Payload:     payload("first"),
					Headers:     []*waldv1.Header{{Key: "k", Value: []byte("v")}},
					TimestampUs: 7,
					Crc32C:      record.CRC32C,
				},
				{Payload: payload("second")},
			}},
			{Records: []*waldv1.Record{{Payload: payload("third")}}},
		},
	})
	if got, _ := state.Load(); err != nil || !slices.Equal(got, want) {
		t.Errorf("saved %v", state.producer(t))
	}
}

func TestStateOfAnotherLogIsRefused(t *testing.T) {
	f, _ := producing(acking)
	client, state := f.start(t), new(memoryState)
	openDurable(t, client, state)
	_, err := client.DurableProducer(soon(t), "other", state)
	if !errors.Is(err, ErrState) || !strings.Contains(err.Error(), `"a"`) {
		t.Errorf("got %v", err)
	}
	for _, nonsense := range []string{"", "nonsense"} {
		if _, err := client.DurableProducer(soon(t), "a", &memoryState{saved: []byte(nonsense)}); !errors.Is(err, ErrState) {
			t.Errorf("got %v for %q", err, nonsense)
		}
	}
	unkept := &memoryState{fails: errors.New("the disk is full")}
	if _, err := client.DurableProducer(soon(t), "a", unkept); !errors.Is(err, ErrState) || !errors.Is(err, unkept.fails) {
		t.Errorf("got %v", err)
	}
}

func TestFailedSaveSendsNothingAndEndsTheProducer(t *testing.T) {
	f, j := producing(acking)
	client, state := f.start(t), new(memoryState)
	producer := openDurable(t, client, state)
	appendAll(t, producer, 0, 1)
	full := errors.New("the disk is full")
	state.failWith(full)
	_, err := producer.AppendBatch(soon(t), Text("never sent"))
	var e *Error
	if !errors.Is(err, ErrState) || !errors.Is(err, full) || !errors.As(err, &e) || e.Outcome != Unknown {
		t.Errorf("got %v", err)
	}
	state.failWith(nil)
	_, err = producer.AppendBatch(soon(t), Text("behind"))
	if !errors.Is(err, ErrEarlierFailure) || !errors.Is(err, full) || !strings.Contains(err.Error(), full.Error()) {
		t.Errorf("behind it: %v", err)
	}
	if err := producer.Flush(soon(t)); !errors.Is(err, ErrEarlierFailure) {
		t.Errorf("flushed: %v", err)
	}
	if err := producer.Close(soon(t)); !errors.Is(err, full) {
		t.Errorf("closed: %v", err)
	}
	// The program gives the batch again, since its sequence is the next one.
	producer = openDurable(t, client, state)
	appendAll(t, producer, 1, 2)
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(j.applied, numbersTo(2)) {
		t.Errorf("the log has %v", j.applied)
	}
}

func TestRefusedBatchEndsTheDurableProducerAndStays(t *testing.T) {
	f, _ := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		if err := applyAll(j, stream, 1); err != nil {
			return err
		}
		facts := stated(NotApplied, Never)
		facts["request_id"] = "1"
		if _, err := stream.Recv(); err != nil {
			return err
		}
		return refusal(codes.InvalidArgument, ErrRecordTooLarge, facts)
	})
	state := new(memoryState)
	producer := openDurable(t, f.start(t), state)
	appendAll(t, producer, 0, 2)
	if err := producer.Flush(soon(t)); !errors.Is(err, ErrRecordTooLarge) || errors.Is(err, ErrEarlierFailure) {
		t.Errorf("flushed: %v", err)
	}
	_, err := producer.AppendBatch(soon(t), Text("x"))
	if !errors.Is(err, ErrRecordTooLarge) || !errors.Is(err, ErrEarlierFailure) {
		t.Errorf("behind it: %v", err)
	}
	if err := producer.Close(soon(t)); !errors.Is(err, ErrRecordTooLarge) {
		t.Errorf("closed: %v", err)
	}
	saved := state.producer(t)
	if count := len(saved.GetBatches()); string(saved.GetBatches()[count-1].GetRecords()[0].GetData()) != "1" {
		t.Errorf("saved %v", saved)
	}
}

func TestDurableProducerKeepsAtMost64BatchesWithoutAnAck(t *testing.T) {
	goOn := make(chan struct{})
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		select {
		case <-goOn:
			return applyAll(j, stream, always)
		case <-stream.Context().Done():
			return nil
		}
	})
	client, state := f.start(t), new(memoryState)
	producer := openDurable(t, client, state)
	appendAll(t, producer, 0, batchesKept)
	ended, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := producer.AppendBatch(ended, Text("no room"))
	var e *Error
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &e) || e.Outcome != NotApplied {
		t.Errorf("got %v", err)
	}
	if err := producer.Flush(ended); !errors.Is(err, context.DeadlineExceeded) || producer.NextSequence() != batchesKept {
		t.Errorf("got %v, next is %d", err, producer.NextSequence())
	}
	// A start that gives up leaves the batches where they are.
	producer.abort()
	if _, err := client.DurableProducer(ended, "a", state, WithInFlight(2, 1<<20)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(goOn)
	producer = openDurable(t, client, state, WithInFlight(2, 1<<20))
	if _, err := producer.AppendBatch(soon(t)); err == nil || producer.NextSequence() != batchesKept {
		t.Error("a batch without records is kept")
	}
	appendAll(t, producer, batchesKept, 100)
	if err := producer.Close(soon(t)); err != nil || !slices.Equal(j.applied, numbersTo(100)) {
		t.Errorf("got %v, the log has %v", err, j.applied)
	}
}

// following is a fake log of this many records, one per message, that begins behind the cursor.
func following(count uint64) *fake {
	f := new(fake)
	f.scan = func(request *waldv1.ScanRequest, stream scanStream) error {
		var next uint64
		fmt.Sscan(string(request.GetCursor()), &next)
		for ; next < count; next++ {
			cursor := []byte(fmt.Sprint(next + 1))
			messages := []*waldv1.ScanResponse{
				messageOf(next, string(cursor)), {Cursor: cursor, CaughtUp: next%2 == 0},
			}
			for _, message := range messages {
				if err := stream.Send(message); err != nil {
					return err
				}
			}
		}
		<-stream.Context().Done()
		return nil
	}
	return f
}

func openFollower(t *testing.T, client *Client, state State, options ...ScanOption) *DurableFollower {
	t.Helper()
	follower, err := client.DurableFollower(context.Background(), Log("a"), state, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(follower.Close)
	return follower
}

// lsnsOf takes the next event, which has records.
func lsnsOf(t *testing.T, follower *DurableFollower) (lsns []LSN) {
	t.Helper()
	if !follower.Next(soon(t)) {
		t.Fatalf("ended with %v", follower.Err())
	}
	for _, record := range follower.Event().Records() {
		lsns = append(lsns, record.LSN)
	}
	if len(lsns) == 0 {
		t.Fatal("an event without records")
	}
	return lsns
}

func TestFollowerGoesOnBehindTheEffectsThatItHasKept(t *testing.T) {
	const count = 12
	client, state := following(count).start(t), new(memoryState)
	var seen, kept []string
	for starts := 0; len(kept) < count; starts++ {
		follower := openFollower(t, client, state, FromLSN(0))
		effects := follower.Effects()
		if (effects == nil) != (starts == 0) || string(effects) != strings.Join(kept, " ") {
			t.Fatalf("start %d found the effects %q", starts, effects)
		}
		// Each start takes two records, and keeps the effects of the first: the second comes again.
		for step := range 2 {
			if len(kept) == count {
				break
			}
			lsns := fmt.Sprint(lsnsOf(t, follower)[0])
			seen = append(seen, lsns)
			if step == 1 {
				break
			}
			kept = append(kept, lsns)
			if err := follower.Keep([]byte(strings.Join(kept, " "))); err != nil {
				t.Fatal(err)
			}
			if string(follower.Effects()) != strings.Join(kept, " ") {
				t.Errorf("the effects are %q", follower.Effects())
			}
		}
		follower.Close()
	}
	if !slices.Equal(kept, numbersTo(count)) || len(seen) != 2*count-1 {
		t.Errorf("kept %v of %v", kept, seen)
	}
	saved := new(waldv1.FollowerState)
	want := &waldv1.FollowerState{Cursor: []byte("12"), Effects: []byte(strings.Join(kept, " ")), Kind: followerKind}
	if err := proto.Unmarshal(state.saved, saved); err != nil || !proto.Equal(saved, want) {
		t.Errorf("saved %v", saved)
	}
}

func TestFollowerReportsAStateThatFails(t *testing.T) {
	client := following(1).start(t)
	if _, err := client.DurableFollower(soon(t), Log("a"), &memoryState{saved: []byte("nonsense")}); !errors.Is(err, ErrState) {
		t.Errorf("got %v", err)
	}
	state := &memoryState{fails: errors.New("the disk is full")}
	follower := openFollower(t, client, state)
	lsnsOf(t, follower)
	if err := follower.Keep([]byte("x")); !errors.Is(err, ErrState) || !errors.Is(err, state.fails) || follower.Effects() != nil {
		t.Errorf("got %v", err)
	}
	state.failWith(nil)
	if err := follower.Keep(nil); err != nil || follower.Effects() == nil {
		t.Errorf("got %v, %v", err, follower.Effects())
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if follower.Next(ended) || !errors.Is(follower.Err(), context.Canceled) {
		t.Errorf("got %v", follower.Err())
	}
}

func TestGapIsAnErrorAndTheNextCallGoesOn(t *testing.T) {
	behind := messageOf(7, "two")
	behind.Gaps = []*waldv1.Gap{
		{Log: "a", FromLsn: new(uint64(1)), ToLsn: new(uint64(5)), Reason: GapExpired},
		{Log: "a", FromLsn: new(uint64(5)), ToLsn: new(uint64(7)), Reason: GapLost},
	}
	f, _ := scanning(send(messageOf(0, "one"), behind, messageOf(8, "three")))
	state := new(memoryState)
	follower := openFollower(t, f.start(t), state, UntilLSN(9))
	lsnsOf(t, follower)
	for _, reason := range []GapReason{GapExpired, GapLost} {
		var gap Gap
		var e *Error
		if follower.Next(soon(t)) || !errors.As(follower.Err(), &gap) || gap.Reason != reason || *gap.ToLSN < 5 {
			t.Fatalf("got %v", follower.Err())
		}
		if !errors.As(follower.Err(), &e) || e.Code != codes.DataLoss || !strings.Contains(e.Error(), `log "a"`) {
			t.Errorf("got %v", e)
		}
		// The records behind the gap have not been returned.
		if string(follower.Cursor()) != "one" || len(follower.Event().Batches) > 0 {
			t.Errorf("the cursor is %q", follower.Cursor())
		}
	}
	if lsns := lsnsOf(t, follower); lsns[0] != 7 || len(follower.Event().Gaps) > 0 || string(follower.Cursor()) != "two" {
		t.Errorf("got %v, cursor %q", lsns, follower.Cursor())
	}
	if lsns := lsnsOf(t, follower); lsns[0] != 8 {
		t.Errorf("got %v", lsns)
	}
	if follower.Next(soon(t)) || follower.Err() != nil {
		t.Errorf("the end is %v", follower.Err())
	}
}

func TestFileStateIsReplacedAtomicallyAndBelongsToItsOwner(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "producer.state")
	state := FileState(path)
	if saved, err := state.Load(); saved != nil || err != nil {
		t.Errorf("got %q, %v", saved, err)
	}
	closer := state.(io.Closer)
	for _, text := range []string{"first", "second, longer", "3", ""} {
		// A reader that has the earlier file open reads all of it.
		earlier, _ := os.Stat(path)
		if err := errors.Join(state.Save([]byte(text)), closer.Close()); err != nil {
			t.Fatal(err)
		}
		if saved, err := state.Load(); string(saved) != text || saved == nil || err != nil {
			t.Errorf("got %q, %v", saved, err)
		}
		later, err := os.Stat(path)
		if err != nil || earlier != nil && os.SameFile(earlier, later) {
			t.Errorf("the file was overwritten in place: %v", err)
		}
		if runtime.GOOS != "windows" && later.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", later.Mode())
		}
	}
	if files, _ := os.ReadDir(directory); len(files) > 2 || runtime.GOOS == "linux" && len(files) != 2 {
		t.Errorf("left %v", files)
	}
	// A save that fails leaves the state as it was.
	closer.Close()
	if err := os.Mkdir(path+".new", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := state.Save([]byte("lost")); err == nil || !strings.Contains(err.Error(), "producer.state") {
		t.Errorf("got %v", err)
	}
	if saved, err := state.Load(); len(saved) > 0 || err != nil {
		t.Errorf("got %q, %v", saved, err)
	}
}

// savedProducer is the state of a producer with these batches without an ack.
func savedProducer(t *testing.T, kind waldv1.StateKind, texts ...string) *memoryState {
	t.Helper()
	state := &waldv1.ProducerState{Log: "a", LogId: 9, Id: "p", Kind: kind}
	for _, text := range texts {
		state.Batches = append(state.Batches, &waldv1.LogBatch{Records: protoRecords([]Record{Text(text)})})
	}
	saved, err := proto.Marshal(state)
	if err != nil {
		t.Fatal(err)
	}
	return &memoryState{saved: saved}
}

func TestStateOfAnotherKindOrCutOffIsRefused(t *testing.T) {
	f, j := producing(acking)
	f.scan = following(1).scan
	client := f.start(t)
	producer, _ := savedProducer(t, producerKind, "0", "1").Load()
	follower, err := proto.Marshal(&waldv1.FollowerState{Cursor: []byte("1"), Effects: []byte("e"), Kind: followerKind})
	if err != nil {
		t.Fatal(err)
	}
	unspecified, _ := savedProducer(t, 0).Load()
	notProducers := [][]byte{unspecified, follower}
	for length := range producer {
		notProducers = append(notProducers, producer[:length])
	}
	for _, saved := range notProducers {
		_, err := client.DurableProducer(soon(t), "a", &memoryState{saved: saved})
		if !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "it is not the state of a producer") {
			t.Errorf("got %v for %q", err, saved)
		}
	}
	notFollowers := [][]byte{producer, []byte("nonsense")}
	for length := range follower {
		notFollowers = append(notFollowers, follower[:length])
	}
	for _, saved := range notFollowers {
		_, err := client.DurableFollower(soon(t), Log("a"), &memoryState{saved: saved})
		var e *Error
		if !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "it is not the state of a follower") {
			t.Errorf("got %v for %q", err, saved)
		}
		if !errors.As(err, &e) || e.Outcome != NotApplied {
			t.Errorf("got %v for %q", err, saved)
		}
	}
	if len(j.sent) > 0 {
		t.Errorf("sent %v", j.sent)
	}
	openFollower(t, client, &memoryState{saved: follower})
	openDurable(t, client, &memoryState{saved: producer})
}

// refusing refuses the first batch with this outcome once the channel is closed.
func refusing(outcome Outcome, goOn chan struct{}) *fake {
	f, _ := producing(func(_ *fake, _ *journal, stream sessionStream, _ int) error {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		<-goOn
		facts := stated(outcome, Never)
		facts["request_id"] = "0"
		return refusal(codes.InvalidArgument, ErrRecordTooLarge, facts)
	})
	return f
}

func TestBatchThatWasKeptBehindAFailureHasAnUnknownOutcome(t *testing.T) {
	goOn, state := make(chan struct{}), new(memoryState)
	producer := openDurable(t, refusing(NotApplied, goOn).start(t), state)
	appendAll(t, producer, 0, 1)
	// The first batch fails while the second is being saved.
	state.saving = func() {
		close(goOn)
		<-producer.acks[0].Done()
	}
	_, err := producer.AppendBatch(soon(t), Text("1"))
	var e, first *Error
	if !errors.As(err, &e) || e.Outcome != Unknown || e.Retry != SafeWithCondition {
		t.Errorf("got %+v", e)
	}
	if !errors.Is(err, ErrEarlierFailure) || !errors.Is(err, ErrRecordTooLarge) {
		t.Errorf("got %v", err)
	}
	if !errors.As(producer.ended, &first) || first.Outcome != NotApplied || !errors.Is(err, first) {
		t.Errorf("the first failure is %v", first)
	}
	if saved := state.producer(t); len(saved.GetBatches()) != 2 {
		t.Errorf("saved %v", saved)
	}
}

func TestBatchThatWasNotKeptWasNotApplied(t *testing.T) {
	goOn, state := make(chan struct{}), new(memoryState)
	client := refusing(Unknown, goOn).start(t)
	producer := openDurable(t, client, state)
	appendAll(t, producer, 0, 1)
	close(goOn)
	<-producer.acks[0].Done()
	for range 2 {
		_, err := producer.AppendBatch(soon(t), Text("1"))
		var e *Error
		if !errors.As(err, &e) || e.Outcome != NotApplied || !errors.Is(err, ErrEarlierFailure) || !errors.Is(err, ErrRecordTooLarge) {
			t.Errorf("got %v", err)
		}
	}
	if producer.ended.Outcome != Unknown || len(state.producer(t).GetBatches()) != 1 {
		t.Errorf("the first failure is %v, saved %v", producer.ended, state.producer(t))
	}
	// The client is closed, and the outcome of the batch before is not known.
	state = new(memoryState)
	producer = openDurable(t, client, state)
	producer.ended = closed("the client").afterUnknown()
	_, err := producer.AppendBatch(soon(t), Text("0"))
	var e *Error
	if !errors.As(err, &e) || e.Outcome != NotApplied || !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
}

func TestFileStateBehindLinksKeepsTheLinks(t *testing.T) {
	directory := t.TempDir()
	target, link := filepath.Join(directory, "target"), filepath.Join(directory, "link")
	if err := errors.Join(os.Symlink("middle", link), os.Symlink(target, filepath.Join(directory, "middle"))); err != nil {
		t.Skip(err)
	}
	// Once without a target, once with one.
	for _, text := range []string{"1", "2"} {
		state := FileState(link)
		if _, err := state.Load(); err != nil {
			t.Fatal(err)
		}
		if err := state.Save([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
			t.Errorf("the link was replaced: %v, %v", info, err)
		}
		if saved, err := os.ReadFile(target); string(saved) != text || err != nil {
			t.Errorf("got %q, %v", saved, err)
		}
		if _, err := FileState(target).Load(); runtime.GOOS == "linux" && !errors.Is(err, errInUse) {
			t.Errorf("a state in use: %v", err)
		}
		if err := state.(io.Closer).Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFileStateIsUsedByOneAtATime(t *testing.T) {
	if runtime.GOOS == "windows" || runtime.GOOS == "aix" || runtime.GOOS == "solaris" {
		t.Skip("no lock")
	}
	f, _ := producing(acking)
	f.scan = following(1).scan
	client, directory := f.start(t), t.TempDir()
	refused := func(err error) {
		t.Helper()
		if !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "another process or producer uses it") {
			t.Errorf("got %v", err)
		}
	}
	path := filepath.Join(directory, "producer.state")
	state := FileState(path)
	producer := openDurable(t, client, state)
	for range 2 {
		for _, again := range []State{FileState(path), state} {
			_, err := client.DurableProducer(soon(t), "a", again)
			refused(err)
		}
		appendAll(t, producer, producer.NextSequence(), producer.NextSequence()+1)
		if err := producer.Close(soon(t)); err != nil {
			t.Fatal(err)
		}
		last := producer
		producer = openDurable(t, client, FileState(path))
		// It does not release the lock of another one.
		last.abort()
		last.Close(soon(t))
	}
	// A failure, or a ctx that ends, does not leave the lock behind.
	appendAll(t, producer, 2, 3)
	producer.fail(closed("the client"))
	producer.Close(soon(t))
	_, err := client.DurableProducer(soon(t), "other", FileState(path))
	if !errors.Is(err, ErrState) || strings.Contains(err.Error(), "uses it") {
		t.Errorf("got %v", err)
	}
	if _, err := client.DurableProducer(soon(t), "a", FileState(path), WithInFlight(0, 0)); err == nil || errors.Is(err, ErrState) {
		t.Errorf("got %v", err)
	}
	if _, err := client.DurableFollower(soon(t), Log("a"), FileState(path)); !errors.Is(err, ErrState) {
		t.Errorf("got %v", err)
	}
	producer = openDurable(t, client, FileState(path))
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path + ".lock"); err != nil {
		t.Error(err)
	}

	path = filepath.Join(directory, "follower.state")
	for range 2 {
		follower := openFollower(t, client, FileState(path))
		_, err = client.DurableFollower(soon(t), Log("a"), FileState(path))
		refused(err)
		if err := follower.Keep([]byte("x")); err != nil {
			t.Error(err)
		}
		follower.Close()
		follower.Close()
		// Another one may have the state by now.
		if err := follower.Keep([]byte("late")); !errors.Is(err, ErrClosed) {
			t.Errorf("got %v", err)
		}
	}
	if follower := openFollower(t, client, FileState(path)); string(follower.Effects()) != "x" {
		t.Errorf("kept %q", follower.Effects())
	}
}

func TestStateWithBatchesIsSavedBeforeTheyAreSent(t *testing.T) {
	state := savedProducer(t, producerKind, "0", "1")
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		state.mutex.Lock()
		saves := state.saves
		state.mutex.Unlock()
		if saves == 0 {
			t.Error("sent before it was saved")
		}
		return applyAll(j, stream, always)
	})
	client, before := f.start(t), slices.Clone(state.saved)
	state.failWith(errors.New("the disk is full"))
	if _, err := client.DurableProducer(soon(t), "a", state); !errors.Is(err, state.fails) {
		t.Errorf("got %v", err)
	}
	state.failWith(nil)
	producer := openDurable(t, client, state)
	if state.saves != 1 || !slices.Equal(state.saved, before) {
		t.Errorf("%d saves, saved %q", state.saves, state.saved)
	}
	if err := producer.Close(soon(t)); err != nil || !slices.Equal(j.applied, numbersTo(2)) || len(j.sent) != 2 {
		t.Errorf("got %v, sent %v", err, j.sent)
	}
	saves := state.saves
	openDurable(t, client, state)
	if state.saves != saves {
		t.Error("saved without batches")
	}
}

func TestWriterEpochIsOnEveryBatch(t *testing.T) {
	epochs := make(chan *uint64, 10)
	f, _ := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return nil
			}
			epochs <- request.GetBatch().GetBatches()[0].GetCondition().WriterEpoch
			answer := ackOf(request, request.GetRequestId())
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
	})
	expect := func(want ...uint64) {
		t.Helper()
		for _, epoch := range want {
			if got := <-epochs; got == nil || *got != epoch {
				t.Errorf("got %v, not %d", got, epoch)
			}
		}
	}
	client := f.start(t)
	durable := openDurable(t, client, savedProducer(t, producerKind, "0", "1"), WithProducerWriterEpoch(4))
	appendAll(t, durable, 2, 3)
	if err := durable.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	expect(4, 4, 4)
	producer, err := client.Producer(soon(t), "a", WithProducerWriterEpoch(0))
	if err != nil {
		t.Fatal(err)
	}
	for _, options := range [][]AppendOption{nil, {If(Condition{MustExist: true})}, {AsWriter(7)}} {
		if _, err := producer.Append(soon(t), []Record{Text("x")}, options...); err != nil {
			t.Fatal(err)
		}
	}
	expect(0, 0, 7)
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	openDurable(t, client, savedProducer(t, producerKind, "0"))
	if got := <-epochs; got != nil {
		t.Errorf("got %d without an epoch", *got)
	}
}

func TestRecordThatCannotBeEncodedIsNotKept(t *testing.T) {
	f, j := producing(acking)
	state := new(memoryState)
	producer := openDurable(t, f.start(t), state)
	appendAll(t, producer, 0, 1)
	saves := state.saves
	wrong := Record{Data: []byte("x"), Headers: []Header{{Key: "\xff"}}}
	_, err := producer.AppendBatch(soon(t), Text("x"), wrong)
	var e *Error
	if !errors.As(err, &e) || e.Code != codes.InvalidArgument || e.Outcome != NotApplied || errors.Is(err, ErrState) {
		t.Errorf("got %v", err)
	}
	if state.saves != saves || producer.NextSequence() != 1 {
		t.Errorf("%d saves, next is %d", state.saves-saves, producer.NextSequence())
	}
	appendAll(t, producer, 1, 2)
	if err := producer.Close(soon(t)); err != nil || !slices.Equal(j.applied, numbersTo(2)) {
		t.Errorf("got %v, the log has %v", err, j.applied)
	}
}

func TestForgottenProducerWithNothingInDoubtGoesOnInANewEpoch(t *testing.T) {
	f, j := producing(acking)
	client, state := f.start(t), new(memoryState)
	producer := openDurable(t, client, state)
	id := producer.ID()
	for life := range uint64(3) {
		// In one run of the program, and over its restarts.
		for half := range uint64(2) {
			first := 20*life + 10*half
			if producer.NextSequence() != first {
				t.Fatalf("begins at %d, not at %d", producer.NextSequence(), first)
			}
			appendAll(t, producer, first, first+10)
			if err := producer.Flush(soon(t)); err != nil {
				t.Fatal(err)
			}
			j.forget()
		}
		if err := producer.Close(soon(t)); err != nil {
			t.Fatal(err)
		}
		producer = openDurable(t, client, state)
	}
	appendAll(t, producer, 60, 61)
	if err := producer.Close(soon(t)); err != nil || !slices.Equal(j.applied, numbersTo(61)) {
		t.Errorf("got %v, the log has %v", err, j.applied)
	}
	want := &waldv1.ProducerState{
		Log: "a", LogId: 9, Id: id, Epoch: 6, EarlierBatches: 60, Sequence: 1, Kind: producerKind,
	}
	if saved := state.producer(t); !proto.Equal(saved, want) {
		t.Errorf("saved %v", saved)
	}
}

func TestBatchesBehindARefusedOneFollowItIntoTheNewEpoch(t *testing.T) {
	for _, test := range []struct{ count, inFlight, acked uint64 }{{60, 512, 1}, {200, 512, 0}, {200, 3, 0}} {
		// The batch in doubt is acked before the refusal.
		state, goOn := savedProducer(t, producerKind, "0"), make(chan struct{})
		session := func(j *journal, stream sessionStream, count int) error {
			if count > 1 {
				return applyAll(j, stream, always)
			}
			if err := applyAll(j, stream, 1); err != nil {
				return err
			}
			<-goOn
			if err := applyAll(j, stream, int(test.acked)); err != nil {
				return err
			}
			j.forget()
			return applyAll(j, stream, always)
		}
		f, j := producing(func(_ *fake, j *journal, stream sessionStream, count int) error {
			return session(j, savedFirst{stream, t, state}, count)
		})
		producer := openDurable(t, f.start(t), state, WithInFlight(int(test.inFlight), 1<<20))
		if err := producer.Flush(soon(t)); err != nil {
			t.Fatal(err)
		}
		// The refusal comes when many batches are under way.
		underway := min(test.count-1, test.inFlight, batchesKept)
		appendAll(t, producer, 1, 1+underway)
		close(goOn)
		appendAll(t, producer, 1+underway, test.count)
		if err := producer.Flush(soon(t)); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(j.applied, numbersTo(int(test.count))) || producer.NextSequence() != test.count {
			t.Errorf("the log has %v, next is %d", j.applied, producer.NextSequence())
		}
		want := &waldv1.ProducerState{
			Log: "a", LogId: 9, Id: "p", Epoch: 1, EarlierBatches: 1 + test.acked, Kind: producerKind,
			Sequence: test.count - 1 - test.acked,
		}
		if saved := state.producer(t); !proto.Equal(saved, want) {
			t.Errorf("saved %v", saved)
		}
	}
}

// savedFirst is a stream whose batches must be in the state, with at most 64, in their epoch.
type savedFirst struct {
	sessionStream
	t     *testing.T
	state *memoryState
}

func (s savedFirst) Recv() (*waldv1.AppendSessionRequest, error) {
	request, err := s.sessionStream.Recv()
	if err == nil {
		producer := request.GetBatch().GetBatches()[0].GetCondition().GetProducer()
		saved := s.state.producer(s.t)
		next := saved.GetSequence() + uint64(len(saved.GetBatches()))
		if saved.GetEpoch() < producer.GetEpoch() || saved.GetEpoch() == producer.GetEpoch() && next <= producer.GetSequence() || len(saved.GetBatches()) > batchesKept {
			s.t.Errorf("batch %d of epoch %d came before it was saved", producer.GetSequence(), producer.GetEpoch())
		}
	}
	return request, err
}

func TestForgottenProducerWithABatchInDoubtIsRefused(t *testing.T) {
	refused := func(producer *DurableProducer, j *journal, state *memoryState) {
		t.Helper()
		if err := producer.Flush(soon(t)); !errors.Is(err, ErrProducerExpired) {
			t.Errorf("got %v", err)
		}
		if err := producer.Close(soon(t)); !errors.Is(err, ErrProducerExpired) {
			t.Errorf("closed: %v", err)
		}
		saved := state.producer(t)
		if saved.GetEpoch() != 0 || len(saved.GetBatches()) != 1 || !slices.Equal(j.applied, numbersTo(1)) {
			t.Errorf("saved %v, the log has %v", saved, j.applied)
		}
	}
	// The batch was sent by an earlier run of the program.
	arrived := make(chan struct{})
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, count int) error {
		if count > 1 {
			return applyAll(j, stream, always)
		}
		requests, err := receive(stream, 1)
		if err != nil {
			return err
		}
		if _, err := j.apply(requests[0]); err != nil {
			return err
		}
		close(arrived)
		<-stream.Context().Done()
		return nil
	})
	client, state := f.start(t), new(memoryState)
	producer := openDurable(t, client, state)
	appendAll(t, producer, 0, 1)
	<-arrived
	producer.abort()
	j.forget()
	for range 2 {
		refused(openDurable(t, client, state), j, state)
	}
	// Or by this run, on a connection that broke.
	f, j = producing(func(f *fake, j *journal, stream sessionStream, count int) error {
		if count > 1 {
			return applyAll(j, stream, always)
		}
		requests, err := receive(stream, 1)
		if err != nil {
			return err
		}
		if _, err := j.apply(requests[0]); err != nil {
			return err
		}
		j.forget()
		f.listener.drop()
		return nil
	})
	state = new(memoryState)
	producer = openDurable(t, f.start(t), state)
	appendAll(t, producer, 0, 1)
	refused(producer, j, state)
}

// blockedIn waits until a goroutine waits for a mutex in a function.
func blockedIn(t *testing.T, function string) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		for _, stack := range strings.Split(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			header, frames, _ := strings.Cut(stack, "\n")
			if strings.Contains(header, "[sync.Mutex.Lock") && strings.Contains(frames, function) {
				return
			}
		}
	}
	t.Fatalf("no goroutine waits in %s", function)
}

func TestRefusalThatComesAfterTheAcksWereTakenBeginsANewEpoch(t *testing.T) {
	opened := make(chan struct{})
	f, j := producing(func(_ *fake, j *journal, stream sessionStream, count int) error {
		if count == 1 {
			// The test gives the refusal.
			close(opened)
			<-stream.Context().Done()
			return nil
		}
		return applyAll(j, stream, always)
	})
	state := new(memoryState)
	producer := openDurable(t, f.start(t), state)
	appendAll(t, producer, 0, 1)
	<-opened
	j.forget()
	p := producer.producer
	p.mutex.Lock()
	result := make(chan error)
	go func() { result <- producer.afterWait(nil) }()
	blockedIn(t, "(*DurableProducer).afterWait")
	p.failLocked(&Error{
		Code:    codes.FailedPrecondition,
		Reason:  ErrProducerExpired,
		Outcome: NotApplied,
		Retry:   Never,
		Facts:   map[string]string{"first_epoch": "1"},
	}, nil)
	p.mutex.Unlock()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	appendAll(t, producer, 1, 2)
	if err := producer.Close(soon(t)); err != nil {
		t.Fatal(err)
	}
	want := &waldv1.ProducerState{Log: "a", LogId: 9, Id: producer.ID(), Epoch: 1, Sequence: 2, Kind: producerKind}
	if saved := state.producer(t); !proto.Equal(saved, want) || !slices.Equal(j.applied, numbersTo(2)) {
		t.Errorf("saved %v, the log has %v", saved, j.applied)
	}
}
