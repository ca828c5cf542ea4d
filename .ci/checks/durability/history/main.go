// Command history judges the answers that concurrent callers of a daemon get.
//
//	history check   records histories of calls under kills and has Porcupine find, or fail to
//	                find, an order in which one caller at a time would get the same answers
//	history nodes   the same of two nodes that share a store and take it over from each other
//	history fences  two writers fence each other out repeatedly; no record of an epoch may
//	                lie at or beyond the tail that a later epoch's fence returned
//
// WALD_ENDPOINT is the daemon's address, or the addresses of both nodes with a comma. At WALD_CONTROL the
// daemon can be killed; see client/conformance/README.md, and for nodes history_program.py. Every check prints a line, `ok` or `FAIL`, and the
// counts follow at the end. Most callers use the generated stubs, which repeat and hide no call.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// Longer than any call may take, including a restart of the daemon.
const callTimeout = 60 * time.Second

var passed, failed int

// check counts and prints one check.
func check(holds bool, format string, values ...any) {
	word := "ok  "
	if holds {
		passed++
	} else {
		failed++
		word = "FAIL"
	}
	fmt.Printf("%s %s\n", word, fmt.Sprintf(format, values...))
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: history check|nodes|fences [FLAGS]")
		os.Exit(2)
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	seed := flags.Uint64("seed", rand.Uint64N(1_000_000), "what all choices follow from")
	var work func() error
	switch os.Args[1] {
	case "check":
		var plan plan
		flags.IntVar(&plan.histories, "histories", 8, "histories to record")
		flags.IntVar(&plan.calls, "calls", 5000, "calls in each")
		flags.IntVar(&plan.clients, "clients", 12, "concurrent callers")
		flags.IntVar(&plan.kills, "kills", 4, "kills in each history")
		flags.DurationVar(&plan.limit, "limit", time.Minute, "time to judge one history")
		work = func() error { return checkHistories(plan, *seed) }
	case "nodes":
		var plan plan
		flags.IntVar(&plan.histories, "histories", 8, "histories to record")
		flags.IntVar(&plan.faults, "faults", 4, "faults in each history")
		flags.IntVar(&plan.clients, "clients", 12, "concurrent callers")
		flags.DurationVar(&plan.limit, "limit", time.Minute, "time to judge one history")
		forgetful := flags.Bool("forgetful", false, "the store loses acked records, which must be seen")
		work = func() error {
			if *forgetful {
				return checkForgetful(plan, *seed)
			}
			return checkNodes(plan, *seed)
		}
	case "fences":
		fences := flags.Int("fences", 400, "fences without kills")
		killed := flags.Int("killed", 60, "fences under kills")
		work = func() error { return checkFences(*fences, *killed, *seed) }
	default:
		fmt.Fprintf(os.Stderr, "unknown: %s\n", os.Args[1])
		os.Exit(2)
	}
	_ = flags.Parse(os.Args[2:])
	began := time.Now()
	fmt.Printf("seed %d: history %s --seed %d\n", *seed, os.Args[1], *seed)
	if err := work(); err != nil {
		check(false, "%v", err)
	}
	fmt.Printf("%.1f s\n%d passed, %d failed\n", time.Since(began).Seconds(), passed, failed)
	if failed > 0 || passed == 0 {
		os.Exit(1)
	}
}

// connect opens a separate connection, so callers do not wait for each other.
func connect() (*grpc.ClientConn, error) { return connectTo(os.Getenv("WALD_ENDPOINT")) }

func connectTo(endpoint string) (*grpc.ClientConn, error) {
	soon := backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 100 * time.Millisecond}
	return grpc.NewClient("passthrough:///"+endpoint,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: soon, MinConnectTimeout: time.Second}),
		// A call waits for a connection: a failed call was sent, or its error says otherwise.
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
}

// control asks the harness for an action, and waits until it is done.
func control(ctx context.Context, action string, arguments map[string]any) error {
	body, err := json.Marshal(arguments)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, os.Getenv("WALD_CONTROL")+"/"+action, bytes.NewReader(body))
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", action, answer.Status)
	}
	return nil
}
