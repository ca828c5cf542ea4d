// Command ledger appends transfers and keeps the balances of their accounts. It may be killed at any
// moment, and started again: two producers append COUNT transfers exactly once, and a follower
// applies each of them once. Each keeps its state in one file of DIR, always together with its
// effects. It prints the balances when all transfers are applied.
//
//	ledger DIR PREFIX COUNT
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	wald "wald.dev/client/go"
)

type transfer struct {
	From   string `json:"from"`
	To     string `json:"to"`
	Amount int64  `json:"amount"`
}

// transferOf: the transfers are the same in every run, so that a repeat has the same content.
func transferOf(number uint64) transfer {
	return transfer{
		From:   fmt.Sprintf("account%d", number*7%10),
		To:     fmt.Sprintf("account%d", (number*3+1)%10),
		Amount: int64(number*13%100) + 1,
	}
}

func produce(ctx context.Context, client *wald.Client, log string, state wald.State, half, count uint64) error {
	producer, err := client.DurableProducer(ctx, log, state)
	if err != nil {
		return err
	}
	for number := producer.NextSequence(); number < count; number++ {
		text, err := json.Marshal(transferOf(2*number + half))
		if err != nil {
			return err
		}
		if _, err := producer.AppendBatch(ctx, wald.Bytes(text)); err != nil {
			return err
		}
	}
	return producer.Close(ctx)
}

type ledger struct {
	Applied  uint64           `json:"applied"`
	Balances map[string]int64 `json:"balances"`
}

func follow(ctx context.Context, client *wald.Client, prefix string, state wald.State, count uint64) (*ledger, error) {
	follower, err := client.DurableFollower(ctx, wald.Prefix(prefix), state)
	if err != nil {
		return nil, err
	}
	defer follower.Close()
	result := &ledger{Balances: make(map[string]int64)}
	if effects := follower.Effects(); effects != nil {
		if err := json.Unmarshal(effects, result); err != nil {
			return nil, err
		}
	}
	for result.Applied < count && follower.Next(ctx) {
		for _, record := range follower.Event().Records() {
			var move transfer
			if err := json.Unmarshal(record.Data, &move); err != nil {
				return nil, err
			}
			result.Balances[move.From] -= move.Amount
			result.Balances[move.To] += move.Amount
			result.Applied++
		}
		effects, err := json.Marshal(result)
		if err != nil {
			return nil, err
		}
		// Together with the cursor behind these records.
		if err := follower.Keep(effects); err != nil {
			return nil, err
		}
	}
	return result, follower.Err()
}

func run(directory, prefix, total string) error {
	count, err := strconv.ParseUint(total, 10, 64)
	if err != nil {
		return err
	}
	endpoint := os.Getenv("WALD_ENDPOINT")
	if endpoint == "" {
		endpoint = wald.DefaultEndpoint
	}
	client, err := wald.Dial(endpoint)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx := context.Background()
	done := make(chan error, 2)
	for half := range uint64(2) {
		log := fmt.Sprintf("%s%d", prefix, half)
		state := wald.FileState(filepath.Join(directory, fmt.Sprintf("producer%d.state", half)))
		go func() { done <- produce(ctx, client, log, state, half, count/2) }()
	}
	state := wald.FileState(filepath.Join(directory, "ledger.state"))
	result, err := follow(ctx, client, prefix, state, count)
	if err := errors.Join(err, <-done, <-done); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: ledger DIR PREFIX COUNT")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
