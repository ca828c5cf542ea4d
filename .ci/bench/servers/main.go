// Command servers appends to a server in a closed loop, and reports the acks.
//
//	servers SYSTEM ADDRESS [FLAGS]
//
// Each caller sends its next append when the one before is acknowledged, so the number in
// flight is constant. Only acks count. The answer is one line of JSON; times are microseconds.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// An appender is one caller's connection to a server. Its append returns when the server has acknowledged.
type appender interface {
	append(ctx context.Context, record []byte) error
}

// load describes the work of a run.
type load struct {
	inFlight    int
	connections int
	bytes       int
	warm        time.Duration
	measured    time.Duration
	level       string
}

// systems connect callers; the second result ends all of their connections.
var systems = map[string]func(context.Context, string, load) ([]appender, func(), error){
	"wald":         dialWald,
	"wald-session": dialWaldSession,
	"redis":        dialRedis,
	"postgresql":   dialPostgres,
	"nats":         dialNATS,
	"etcd":         dialEtcd,
	"s2-lite":      dialS2,
}

// result is the measurement of one run.
type result struct {
	Acks int64 `json:"acks"`
	// AllAcks includes the warm-up: the server's processor time covers it, too.
	AllAcks   int64   `json:"all_acks"`
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
	P50       float64 `json:"p50_us"`
	P99       float64 `json:"p99_us"`
	P999      float64 `json:"p999_us"`
	Max       float64 `json:"max_us"`
}

func main() {
	if len(os.Args) < 3 || systems[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: servers SYSTEM ADDRESS [FLAGS]")
		os.Exit(2)
	}
	flags := flag.NewFlagSet("servers", flag.ExitOnError)
	var wanted load
	flags.IntVar(&wanted.inFlight, "in-flight", 64, "appends in flight")
	flags.IntVar(&wanted.connections, "connections", 4, "connections, at most one for each in flight; where one carries one call only, one for each")
	flags.IntVar(&wanted.bytes, "bytes", 128, "bytes of each record")
	flags.DurationVar(&wanted.warm, "warm", 500*time.Millisecond, "time before what is measured")
	flags.DurationVar(&wanted.measured, "measured", 2*time.Second, "time that is measured")
	flags.StringVar(&wanted.level, "level", "durable", "durable, written or replicated: wald's durability; the others' is a setting of theirs")
	_ = flags.Parse(os.Args[3:])
	wanted.connections = min(wanted.connections, wanted.inFlight)
	found, err := run(systems[os.Args[1]], os.Args[2], wanted)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(found)
}

func run(dial func(context.Context, string, load) ([]appender, func(), error), address string, wanted load) (*result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wanted.warm+wanted.measured+time.Minute)
	defer cancel()
	callers, hangUp, err := dial(ctx, address, wanted)
	if err != nil {
		return nil, fmt.Errorf("connecting: %w", err)
	}
	defer hangUp()
	record := make([]byte, wanted.bytes)
	for i := range record {
		// Text, so that no server must escape it.
		record[i] = 'a' + byte(i*7%26)
	}
	var running sync.WaitGroup
	var failure atomic.Pointer[error]
	var all atomic.Int64
	times := make([]*hdrhistogram.Histogram, len(callers))
	from := time.Now().Add(wanted.warm)
	until := from.Add(wanted.measured)
	for i, caller := range callers {
		times[i] = hdrhistogram.New(1, int64(time.Minute/time.Microsecond), 3)
		running.Go(func() {
			acks := int64(0)
			for sent := time.Now(); sent.Before(until) && failure.Load() == nil; acks++ {
				if err := caller.append(ctx, record); err != nil {
					failure.CompareAndSwap(nil, &err)
					return
				}
				acked := time.Now()
				if acked.After(from) && acked.Before(until) {
					_ = times[i].RecordValue(acked.Sub(sent).Microseconds())
				}
				sent = acked
			}
			all.Add(acks)
		})
	}
	running.Wait()
	if failed := failure.Load(); failed != nil {
		return nil, fmt.Errorf("appending: %w", *failed)
	}
	together := times[0]
	for _, more := range times[1:] {
		together.Merge(more)
	}
	acks := together.TotalCount()
	at := func(percent float64) float64 { return float64(together.ValueAtQuantile(percent)) }
	return &result{
		Acks:      acks,
		AllAcks:   all.Load(),
		Seconds:   wanted.measured.Seconds(),
		PerSecond: float64(acks) / wanted.measured.Seconds(),
		P50:       at(50),
		P99:       at(99),
		P999:      at(99.9),
		Max:       float64(together.Max()),
	}, nil
}

// spread gives every caller one of the connections, in turn.
func spread[C any](connections []C, callers int, use func(connection C, caller int) appender) []appender {
	all := slices.Repeat([]appender{nil}, callers)
	for i := range all {
		all[i] = use(connections[i%len(connections)], i)
	}
	return all
}
