// Command conformance carries out the cases in client/conformance with this package, as the
// README there says, and takes part in the chaos run.
//
//	conformance
//	conformance chaos-producer LOG ID RATE
//	conformance chaos-follower PREFIX COUNT
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	wald "wald.dev/client/go"
)

// A case that takes longer has failed.
const caseTimeout = 60 * time.Second

type testCase struct {
	Name  string
	Steps []step
}

func main() {
	log.SetFlags(0)
	err := errors.New("usage: conformance [chaos-producer LOG ID RATE | chaos-follower PREFIX COUNT]")
	switch arguments := os.Args[1:]; {
	case len(arguments) == 0:
		err = runCases()
	case len(arguments) == 4 && arguments[0] == "chaos-producer":
		err = chaosProducer(context.Background(), arguments[1], arguments[2], arguments[3])
	case len(arguments) == 3 && arguments[0] == "chaos-follower":
		err = chaosFollower(context.Background(), arguments[1], arguments[2])
	}
	if err != nil {
		log.Fatalf("conformance: %v", err)
	}
}

func runCases() error {
	cases, err := readCases(os.Getenv("WALD_CASES"))
	if err != nil {
		return err
	}
	passed, failed := 0, 0
	for _, testCase := range cases {
		if !wanted(testCase.Name) {
			continue
		}
		if err := carryOut(testCase); err != nil {
			failed++
			fmt.Printf("FAIL %s: %s\n", testCase.Name, strings.ReplaceAll(err.Error(), "\n", " "))
			continue
		}
		passed++
		fmt.Printf("ok %s\n", testCase.Name)
	}
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	if failed > 0 || passed == 0 {
		os.Exit(1)
	}
	return nil
}

func readCases(path string) ([]testCase, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var content struct{ Cases []testCase }
	decoder := json.NewDecoder(file)
	// Numbers are integers of 64 bits.
	decoder.UseNumber()
	if err := decoder.Decode(&content); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return content.Cases, nil
}

func wanted(name string) bool {
	only := os.Getenv("WALD_ONLY")
	if only == "" {
		return true
	}
	for _, one := range strings.Split(only, ",") {
		if one == name {
			return true
		}
	}
	return false
}

// carryOut runs a case with a client of its own.
func carryOut(testCase testCase) error {
	// Not a deadline, so that the client's own default is in force.
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	client, err := wald.FromEnv()
	if err != nil {
		return err
	}
	defer client.Close()
	run := newRun(client, testCase.Name)
	defer run.close()
	late := time.AfterFunc(caseTimeout, func() {
		run.mutex.Lock()
		defer run.mutex.Unlock()
		cancel(fmt.Errorf("not done after %v; began last: %s", caseTimeout, run.last))
	})
	defer late.Stop()
	done := make(chan error, 1)
	go func() { done <- run.steps(ctx, testCase.Steps, run.names) }()
	select {
	case err = <-done:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
