package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	wald "wald.dev/client/go/waldv1"
)

// Number of appends that a writer has in flight.
const lanes = 4

// duel is two writers on one log, and the answers that they got.
type duel struct {
	log    string
	fences atomic.Int64
	wanted int64

	mutex sync.Mutex
	// Epoch and tail of each answered fence.
	told [][2]uint64
	// lsn -> data that was acked there.
	acked map[uint64]string
	lost  int
}

// checkFences runs a duel without kills, and one with.
func checkFences(calm, killed int, seed uint64) error {
	for number, wanted := range []int{calm, killed} {
		duel := &duel{log: fmt.Sprintf("fences/%x/%d", rand.Uint64(), number), wanted: int64(wanted), acked: map[uint64]string{}}
		if err := duel.run(seed, number == 1); err != nil {
			return err
		}
	}
	return nil
}

func (d *duel) run(seed uint64, kills bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	writers, writing := newGroup(ctx)
	for writer := range 2 {
		random := rand.New(rand.NewPCG(seed, uint64(writer)))
		writers.run(func() error { return d.writer(writing, writer, random) })
	}
	killed := 0
	if kills {
		random := rand.New(rand.NewPCG(seed, 2))
		writers.run(func() error {
			for d.fences.Load() < d.wanted {
				select {
				case <-writing.Done():
					return writing.Err()
				case <-time.After(time.Duration(100+random.IntN(400)) * time.Millisecond):
				}
				if err := control(writing, "kill", nil); err != nil {
					return err
				}
				killed++
			}
			return nil
		})
	}
	if err := writers.wait(); err != nil {
		return err
	}
	return d.judge(ctx, killed)
}

// writer takes over the log and appends until the other writer takes it.
func (d *duel) writer(ctx context.Context, number int, random *rand.Rand) error {
	connection, err := connect()
	if err != nil {
		return err
	}
	defer connection.Close()
	wal := wald.NewWalServiceClient(connection)
	for round := 0; d.fences.Load() < d.wanted; round++ {
		fence, err := wal.Fence(ctx, &wald.FenceRequest{Log: d.log})
		if err != nil {
			if _, err := reasonOf(err); err != nil {
				return err
			}
			continue
		}
		d.fences.Add(1)
		d.mutex.Lock()
		d.told = append(d.told, [2]uint64{fence.GetWriterEpoch(), fence.GetTailLsn()})
		d.mutex.Unlock()
		over, appending := newGroup(ctx)
		for lane := range lanes {
			over.run(func() error {
				return d.appendUntilFenced(appending, wal, fence.GetWriterEpoch(), fmt.Sprintf("%d %d", number, lane))
			})
		}
		if err := over.wait(); err != nil {
			return err
		}
		// The other writer gets some appends in before it is fenced out.
		time.Sleep(time.Duration(random.IntN(3000)) * time.Microsecond)
	}
	return nil
}

func (d *duel) appendUntilFenced(ctx context.Context, wal wald.WalServiceClient, epoch uint64, who string) error {
	for n := 0; d.fences.Load() < d.wanted; n++ {
		data := fmt.Sprintf("%d %s %d", epoch, who, n)
		request := &wald.AppendRequest{Log: d.log, Record: &wald.Record{Payload: &wald.Record_Text{Text: data}}, Condition: &wald.AppendCondition{WriterEpoch: &epoch}}
		answer, err := wal.Append(ctx, request)
		if err != nil {
			reason, err := reasonOf(err)
			if reason == "FENCED" || err != nil {
				return err
			}
			d.mutex.Lock()
			d.lost++
			d.mutex.Unlock()
			continue
		}
		d.mutex.Lock()
		d.acked[answer.GetLsn()] = data
		d.mutex.Unlock()
	}
	return nil
}

// reasonOf returns the reason of a failed call, empty if its connection was lost. It returns an
// error for a failure that no call here should get.
func reasonOf(err error) (string, error) {
	said, is := status.FromError(err)
	if !is {
		return "", err
	}
	for _, detail := range said.Details() {
		if info, is := detail.(*errdetails.ErrorInfo); is {
			switch reason := info.GetReason(); reason {
			case "FENCED", "STARTING", "DRAINING", "BUSY":
				return reason, nil
			}
			return "", err
		}
	}
	if said.Code().String() == "Unavailable" {
		return "", nil
	}
	return "", err
}

// judge compares the stored log with the writers' answers.
func (d *duel) judge(ctx context.Context, killed int) error {
	connection, err := connect()
	if err != nil {
		return err
	}
	defer connection.Close()
	stored, err := scan(ctx, connection, d.log)
	if err != nil {
		return err
	}
	epochs := make([]uint64, len(stored))
	back := 0
	for lsn, data := range stored {
		epochs[lsn], err = strconv.ParseUint(strings.Fields(data)[0], 10, 64)
		if err != nil {
			return err
		}
		if lsn > 0 && epochs[lsn] < epochs[lsn-1] {
			back++
		}
	}
	passed := passes(d.told, epochs)
	// A planted fault must be found: a record of the epoch before, at the tail that a fence returned.
	planted := slices.Clone(epochs)
	for _, fence := range d.told {
		if fence[1] < uint64(len(planted)) {
			planted[fence[1]] = fence[0] - 1
			break
		}
	}
	missing := 0
	for lsn, data := range d.acked {
		if lsn >= uint64(len(stored)) || stored[lsn] != data {
			missing++
		}
	}
	taken := map[uint64]bool{}
	for _, fence := range d.told {
		taken[fence[0]] = true
	}
	check(int64(len(d.told)) >= d.wanted && len(d.acked) > 0, "%d fences of two writers, %d acked appends, %d of unknown outcome, %d kills", len(d.told), len(d.acked), d.lost, killed)
	check(len(passed) == 0, "no record of an older epoch at or beyond the tail that a fence returned: %d %s", len(passed), strings.Join(passed, "; "))
	check(len(passes(d.told, planted)) > 0, "a planted one is found")
	check(back == 0, "epochs never go back from one record to the next: %d", back)
	check(len(taken) == len(d.told), "no epoch was given to two fences: %d", len(d.told)-len(taken))
	check(missing == 0, "every acked append is where its ack said: %d missing", missing)
	return nil
}

// passes finds the fences with a record of an older epoch at or beyond their tail.
func passes(told [][2]uint64, epochs []uint64) []string {
	var found []string
	for _, fence := range told {
		for lsn := fence[1]; lsn < uint64(len(epochs)); lsn++ {
			if epochs[lsn] < fence[0] {
				found = append(found, fmt.Sprintf("fence %d told tail %d, and at %d lies a record of epoch %d", fence[0], fence[1], lsn, epochs[lsn]))
				break
			}
		}
	}
	return found
}

// scan returns the data of a whole log.
func scan(ctx context.Context, connection *grpc.ClientConn, log string) ([]string, error) {
	var stored []string
	for {
		page, err := wald.NewWalServiceClient(connection).Read(ctx, &wald.ReadRequest{Log: log, Start: &wald.ReadRequest_Lsn{Lsn: uint64(len(stored))}, MaxRecords: 10_000})
		if err != nil {
			return nil, err
		}
		records := page.GetBatch().GetRecords()
		if len(records) == 0 {
			if page.GetTailLsn() != uint64(len(stored)) {
				return nil, errors.New("the log ends before its tail")
			}
			return stored, nil
		}
		for _, record := range records {
			stored = append(stored, string(record.GetData()))
		}
	}
}
