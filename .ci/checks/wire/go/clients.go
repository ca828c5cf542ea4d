package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	client "wald.dev/client/go"
	wald "wald.dev/client/go/waldv1"
)

func dial(address string) (*grpc.ClientConn, wald.WalServiceClient, error) {
	transport := insecure.NewCredentials()
	if secured != nil {
		transport = credentials.NewTLS(secured)
	}
	connection, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(transport))
	if err != nil {
		return nil, nil, err
	}
	return connection, wald.NewWalServiceClient(connection), nil
}

func record(size int) *wald.Record {
	return &wald.Record{Payload: &wald.Record_Data{Data: make([]byte, size)}}
}

func request(id uint64, log string, size int) *wald.AppendSessionRequest {
	batch := &wald.LogBatch{Log: log, Records: []*wald.Record{record(size)}}
	return &wald.AppendSessionRequest{RequestId: id, Batch: &wald.AppendBatchRequest{Batches: []*wald.LogBatch{batch}}}
}

// failures counts errors by their text.
type failures struct {
	mutex  sync.Mutex
	counts map[string]int
}

func (f *failures) add(err error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.counts == nil {
		f.counts = map[string]int{}
	}
	said := status.Convert(err)
	text := said.Message()
	f.counts[said.Code().String()+" "+text[:min(len(text), 160)]]++
}

type sessionsResult struct {
	Acked    int64          `json:"acked"`
	Seconds  float64        `json:"seconds"`
	Failures map[string]int `json:"failures"`
}

// sessions sends messages as fast as flow control lets it, on one connection.
func sessions(flags *flag.FlagSet) func([]string) error {
	count := flags.Int("sessions", 1, "sessions on the connection")
	messages := flags.Int("messages", 100_000, "messages of each")
	size := flags.Int("bytes", 1, "bytes of each message's record")
	own := flags.Bool("client", false, "by the client for Go, at its defaults")
	return func(arguments []string) error {
		var acked atomic.Int64
		var failed failures
		connection, service, err := dial(arguments[0])
		if err != nil {
			return err
		}
		defer connection.Close()
		var connected *client.Client
		if *own {
			if connected, err = client.Dial(arguments[0]); err != nil {
				return err
			}
			defer connected.Close()
		}
		began := time.Now()
		var group sync.WaitGroup
		for i := range *count {
			group.Go(func() {
				log := fmt.Sprintf("session-%d", i)
				var err error
				if *own {
					err = clientSession(ctx, connected, log, *messages, *size, &acked)
				} else {
					err = plainSession(ctx, service, log, *messages, *size, &acked)
				}
				if err != nil {
					failed.add(err)
				}
			})
		}
		group.Wait()
		return told(sessionsResult{acked.Load(), time.Since(began).Seconds(), failed.counts})
	}
}

var ctx = context.Background()

func plainSession(ctx context.Context, service wald.WalServiceClient, log string, messages, size int, acked *atomic.Int64) error {
	stream, err := service.AppendSession(ctx)
	if err != nil {
		return err
	}
	go func() {
		for id := range messages {
			// Recv returns the reason.
			if stream.Send(request(uint64(id), log, size)) != nil {
				return
			}
		}
		_ = stream.CloseSend()
	}()
	for expected := uint64(0); ; expected++ {
		ack, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if ack.GetRequestId() != expected {
			return fmt.Errorf("ack %d came instead of %d", ack.GetRequestId(), expected)
		}
		acked.Add(1)
	}
}

func clientSession(ctx context.Context, connected *client.Client, log string, messages, size int, acked *atomic.Int64) error {
	session, err := connected.Session(ctx)
	if err != nil {
		return err
	}
	defer session.Close()
	pending := make(chan *client.Pending[client.BatchAck], messages)
	var sending error
	go func() {
		defer close(pending)
		for range messages {
			batch := client.Batch{Logs: []client.LogBatch{{Log: log, Records: []client.Record{{Data: make([]byte, size)}}}}}
			one, err := session.Send(ctx, batch)
			if err != nil {
				sending = err
				return
			}
			pending <- one
		}
	}()
	for one := range pending {
		if _, err := one.Wait(ctx); err != nil {
			return err
		}
		acked.Add(1)
	}
	return sending
}

// neighbours are a follower and a session that share a connection with other calls.
type neighbours struct {
	acks, followed             atomic.Int64
	session, follower, sending atomic.Value
	stop                       context.CancelFunc
}

func beside(service wald.WalServiceClient) (*neighbours, error) {
	if _, err := service.Append(ctx, &wald.AppendRequest{Log: "shared", Record: record(1)}); err != nil {
		return nil, err
	}
	own, stop := context.WithCancel(ctx)
	found := &neighbours{stop: stop}
	session, err := service.AppendSession(own)
	if err != nil {
		return nil, err
	}
	follower, err := service.Scan(own, &wald.ScanRequest{Selector: &wald.ScanRequest_Log{Log: "shared"}, Follow: true})
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			if _, err := session.Recv(); err != nil {
				found.session.Store(err.Error())
				return
			}
			found.acks.Add(1)
		}
	}()
	go func() {
		for {
			message, err := follower.Recv()
			if err != nil {
				found.follower.Store(err.Error())
				return
			}
			for _, batch := range message.GetBatches() {
				found.followed.Add(int64(len(batch.GetRecords())))
			}
		}
	}()
	go func() {
		for id := uint64(0); session.Send(request(id, "shared", 1)) == nil; id++ {
			time.Sleep(5 * time.Millisecond)
		}
	}()
	return found, nil
}

// Maximum time until a session that lives gets its next ack. A machine may stand still for seconds.
const patience = 20 * time.Second

type besideResult struct {
	Calls    int            `json:"calls"`
	Seconds  float64        `json:"seconds"`
	Failures map[string]int `json:"failures"`
	// Acks of the neighbours, before and after the calls have ended.
	Acks          int64 `json:"acks"`
	AcksAfter     int64 `json:"acks_after"`
	FollowedAfter int64 `json:"followed_after"`
	// Reason why a neighbour ended; nil if it continues.
	Session  any `json:"session"`
	Follower any `json:"follower"`
}

func (n *neighbours) result(calls int, took time.Duration, failed *failures) besideResult {
	acks, followed := n.acks.Load(), n.followed.Load()
	for until := time.Now().Add(patience); time.Now().Before(until) && n.acks.Load() == acks && n.session.Load() == nil; {
		time.Sleep(20 * time.Millisecond)
	}
	return besideResult{
		Calls: calls, Seconds: took.Seconds(), Failures: failed.counts,
		Acks: acks, AcksAfter: n.acks.Load() - acks, FollowedAfter: n.followed.Load() - followed,
		Session: n.session.Load(), Follower: n.follower.Load(),
	}
}

// cancels opens followers a group at a time and cancels each group at one moment.
func cancels(flags *flag.FlagSet) func([]string) error {
	calls := flags.Int("calls", 1000, "calls in all")
	group := flags.Int("group", 100, "calls that are cancelled at one moment")
	return func(arguments []string) error {
		connection, service, err := dial(arguments[0])
		if err != nil {
			return err
		}
		defer connection.Close()
		shared, err := beside(service)
		if err != nil {
			return err
		}
		defer shared.stop()
		time.Sleep(200 * time.Millisecond)
		var failed failures
		began := time.Now()
		for range *calls / *group {
			own, cancel := context.WithCancel(ctx)
			var waiting, opened sync.WaitGroup
			for range *group {
				opened.Add(1)
				waiting.Go(func() {
					stream, err := service.Scan(own, &wald.ScanRequest{Selector: &wald.ScanRequest_Log{Log: "shared"}, Follow: true})
					opened.Done()
					for err == nil {
						_, err = stream.Recv()
					}
					if status.Code(err) != codes.Canceled {
						failed.add(err)
					}
				})
			}
			opened.Wait()
			time.Sleep(20 * time.Millisecond)
			cancel()
			waiting.Wait()
		}
		return told(shared.result(*calls, time.Since(began), &failed))
	}
}

// deadlines calls with a deadline that a pause of the daemon exceeds.
func deadlines(flags *flag.FlagSet) func([]string) error {
	callers := flags.Int("callers", 64, "callers")
	timeout := flags.Duration("timeout", 300*time.Millisecond, "deadline of a call")
	seconds := flags.Duration("seconds", 4*time.Second, "time of all")
	return func(arguments []string) error {
		connection, service, err := dial(arguments[0])
		if err != nil {
			return err
		}
		defer connection.Close()
		shared, err := beside(service)
		if err != nil {
			return err
		}
		defer shared.stop()
		var failed failures
		var calls atomic.Int64
		began := time.Now()
		var waiting sync.WaitGroup
		for range *callers {
			waiting.Go(func() {
				for time.Since(began) < *seconds {
					own, cancel := context.WithTimeout(ctx, *timeout)
					_, err := service.Append(own, &wald.AppendRequest{Log: "deadline", Record: record(100)})
					cancel()
					calls.Add(1)
					if err != nil && status.Code(err) != codes.DeadlineExceeded {
						failed.add(err)
					}
				}
			})
		}
		waiting.Wait()
		return told(shared.result(int(calls.Load()), time.Since(began), &failed))
	}
}

type window struct {
	// Seconds since the Unix epoch.
	Began    float64        `json:"began"`
	Calls    int            `json:"calls"`
	P50      int64          `json:"p50_us"`
	P99      int64          `json:"p99_us"`
	Most     int64          `json:"max_us"`
	Failures map[string]int `json:"failures"`
}

// bystander appends at a steady pace, and prints a line for each window.
func bystander(flags *flag.FlagSet) func([]string) error {
	rate := flags.Int("rate", 400, "appends a second")
	size := flags.Int("bytes", 100, "bytes of a record")
	length := flags.Duration("window", 500*time.Millisecond, "time that a line is about")
	durable := flags.Bool("durable", false, "wait for the flush")
	seconds := flags.Duration("seconds", 10*time.Minute, "end after this time")
	return func(arguments []string) error {
		connection, service, err := dial(arguments[0])
		if err != nil {
			return err
		}
		defer connection.Close()
		durability := wald.Durability_DURABILITY_WRITTEN
		if *durable {
			durability = wald.Durability_DURABILITY_DURABLE
		}
		var mutex sync.Mutex
		var times []time.Duration
		failed := &failures{}
		ticker := time.NewTicker(time.Second / time.Duration(*rate))
		defer ticker.Stop()
		began, all := time.Now(), time.Now()
		// A call that takes long does not hold back the next one.
		places := make(chan struct{}, 64)
		for now := range ticker.C {
			if now.Sub(began) >= *length {
				mutex.Lock()
				line := window{float64(began.UnixMicro()) / 1e6, len(times), quantile(times, 0.5), quantile(times, 0.99), quantile(times, 1), failed.counts}
				times, failed = nil, &failures{}
				mutex.Unlock()
				if err := told(line); err != nil || now.Sub(all) > *seconds {
					return err
				}
				began = now
			}
			places <- struct{}{}
			go func() {
				at := time.Now()
				own, cancel := context.WithTimeout(ctx, 5*time.Second)
				_, err := service.Append(own, &wald.AppendRequest{Log: "bystander", Record: record(*size), Durability: durability})
				cancel()
				mutex.Lock()
				if err != nil {
					failed.add(err)
				} else {
					times = append(times, time.Since(at))
				}
				mutex.Unlock()
				<-places
			}()
		}
		return nil
	}
}

type refusalsResult struct {
	// Median of each token's calls, in nanoseconds.
	Medians []int64 `json:"medians_ns"`
	// Whether all tokens get the same answers, as the bytes of google.rpc.Status. Its map has no order, so one token
	// can get several.
	Same bool `json:"same"`
	// Text of the last answer.
	Text string `json:"text"`
}

// refusals appends with each token in turn. Every call must fail.
func refusals(flags *flag.FlagSet) func([]string) error {
	calls := flags.Int("calls", 10_000, "calls with each token")
	return func(arguments []string) error {
		connection, service, err := dial(arguments[0])
		if err != nil {
			return err
		}
		defer connection.Close()
		tokens := arguments[1:]
		times := make([][]time.Duration, len(tokens))
		answers := make([]map[string]bool, len(tokens))
		for place := range answers {
			answers[place] = map[string]bool{}
		}
		text := ""
		for turn := range *calls {
			for place := range tokens {
				// Each token follows each other one equally often.
				token := (place*(1+turn%(len(tokens)-1)) + turn) % len(tokens)
				own := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+tokens[token])
				at := time.Now()
				_, err := service.Append(own, &wald.AppendRequest{Log: "refused", Record: record(1)})
				took := time.Since(at)
				said := status.Convert(err)
				if said.Code() == codes.OK {
					return fmt.Errorf("token %d is accepted", token)
				}
				bytes, err := proto.MarshalOptions{Deterministic: true}.Marshal(said.Proto())
				if err != nil {
					return err
				}
				answers[token][string(bytes)] = true
				text = said.Message()
				times[token] = append(times[token], took)
			}
		}
		medians := []int64{}
		for _, some := range times {
			sort.Slice(some, func(i, j int) bool { return some[i] < some[j] })
			medians = append(medians, some[len(some)/2].Nanoseconds())
		}
		same := true
		for _, some := range answers {
			same = same && maps.Equal(some, answers[0])
		}
		return told(refusalsResult{medians, same, text})
	}
}
