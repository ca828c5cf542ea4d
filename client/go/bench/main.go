// Command bench measures appends of 128 bytes in a closed loop, by this client or by go-redis:
//
//	go run . wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]
//
// It prints one line of JSON. A warm-up of 1 second comes first.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	wald "wald.dev/client/go"
)

const (
	warmUp      = time.Second
	recordBytes = 128
)

type result struct {
	Client   string  `json:"client"`
	Server   string  `json:"server"`
	InFlight int     `json:"in_flight"`
	Acks     int     `json:"acks"`
	Seconds  float64 `json:"seconds"`
	P50us    float64 `json:"p50_us"`
	P99us    float64 `json:"p99_us"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	unary := len(arguments) == 5 && arguments[4] == "--unary"
	if len(arguments) != 4 && !unary {
		return fmt.Errorf("usage: bench wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]")
	}
	inFlight, err := strconv.Atoi(arguments[2])
	if err != nil {
		return err
	}
	seconds, err := strconv.ParseFloat(arguments[3], 64)
	if err != nil {
		return err
	}
	send, end, err := connect(arguments[0], arguments[1], unary)
	if err != nil {
		return err
	}
	defer end()
	if _, err := measure(send, inFlight, warmUp); err != nil {
		return err
	}
	began := time.Now()
	times, err := measure(send, inFlight, time.Duration(seconds*float64(time.Second)))
	if err != nil {
		return err
	}
	slices.Sort(times)
	at := func(part float64) float64 {
		return float64(times[int(part*float64(len(times)-1))].Nanoseconds()) / 1e3
	}
	return json.NewEncoder(os.Stdout).Encode(result{
		Client:   "go",
		Server:   arguments[0],
		InFlight: inFlight,
		Acks:     len(times),
		Seconds:  time.Since(began).Seconds(),
		P50us:    at(0.5),
		P99us:    at(0.99),
	})
}

// connect gives the function that appends one record.
func connect(server, endpoint string, unary bool) (send func() error, end func() error, err error) {
	ctx, data := context.Background(), slices.Repeat([]byte{'x'}, recordBytes)
	switch server {
	case "wald":
		client, err := wald.Dial(endpoint, wald.WithSharedAppends(!unary))
		if err != nil {
			return nil, nil, err
		}
		record := wald.Record{Data: data}
		return func() error {
			_, err := client.Append(ctx, "log", record, wald.WithDurability(wald.Durable))
			return err
		}, client.Close, nil
	case "redis":
		// The default options, as most programs have them.
		client := redis.NewClient(&redis.Options{Addr: endpoint})
		return func() error {
			return client.XAdd(ctx, &redis.XAddArgs{Stream: "log", Values: []any{"d", data}}).Err()
		}, client.Close, nil
	}
	return nil, nil, fmt.Errorf("%q is neither wald nor redis", server)
}

// measure gives the time of each append.
func measure(send func() error, inFlight int, span time.Duration) ([]time.Duration, error) {
	var all []time.Duration
	var failure error
	var mutex sync.Mutex
	var callers sync.WaitGroup
	end := time.Now().Add(span)
	for range inFlight {
		callers.Go(func() {
			var times []time.Duration
			var err error
			for began := time.Now(); err == nil && began.Before(end); {
				err = send()
				now := time.Now()
				times = append(times, now.Sub(began))
				began = now
			}
			mutex.Lock()
			defer mutex.Unlock()
			all = append(all, times...)
			if err != nil {
				failure = err
			}
		})
	}
	callers.Wait()
	return all, failure
}
