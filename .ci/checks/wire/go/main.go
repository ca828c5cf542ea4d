// Command wire talks to a daemon as real clients do, and as hostile clients.
//
//	wire sessions ADDR   append sessions of grpc-go, or of the client for Go, with small records
//	wire cancels ADDR    cancels calls beside a follower and a session on the same connection
//	wire deadlines ADDR  callers with short deadlines beside a follower and a session
//	wire bystander ADDR  appends at a steady pace on a connection of its own
//	wire flood KIND ADDR floods of HTTP/2 frames
//	wire resets ADDR     appends that are reset when they are sent
//	wire slow ADDR       a scan that is read slowly, through a small receive buffer
//	wire stuck KIND ADDR a peer that stops midway, until standard input ends
//	wire idle KIND ADDR  connections that send nothing, or not enough
//	wire handshakes ADDR  connections that begin at once
//	wire refusals ADDR TOKEN...  appends with tokens that are refused: times and answers
//
// With -ca FILE they speak TLS. Results are one line of JSON each.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sort"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: wire COMMAND [FLAGS] ARGUMENTS")
		os.Exit(2)
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	var work func(arguments []string) error
	switch os.Args[1] {
	case "sessions":
		work = sessions(flags)
	case "cancels":
		work = cancels(flags)
	case "deadlines":
		work = deadlines(flags)
	case "bystander":
		work = bystander(flags)
	case "flood":
		work = flood(flags)
	case "resets":
		work = resets(flags)
	case "slow":
		work = slow(flags)
	case "stuck":
		work = stuck(flags)
	case "idle":
		work = idle(flags)
	case "handshakes":
		work = handshakes(flags)
	case "refusals":
		work = refusals(flags)
	default:
		fmt.Fprintf(os.Stderr, "unknown: %s\n", os.Args[1])
		os.Exit(2)
	}
	flags.Func("ca", "file with the CA of the server: speak TLS", trust)
	_ = flags.Parse(os.Args[2:])
	if err := work(flags.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Prints a result as one line of JSON.
func told(result any) error {
	return json.NewEncoder(os.Stdout).Encode(result)
}

// quantile of durations, in microseconds.
func quantile(times []time.Duration, at float64) int64 {
	if len(times) == 0 {
		return 0
	}
	sort.Slice(times, func(i, j int) bool { return times[i] < times[j] })
	return times[min(len(times)-1, int(float64(len(times))*at))].Microseconds()
}
