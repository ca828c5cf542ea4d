// Command ledger appends transfers and keeps the balances of their accounts. It may be killed at any
// moment, and started again: two producers append COUNT transfers exactly once, and a follower
// applies each of them once. Each keeps its state in one file of DIR, always together with its
// effects. It prints the balances when all transfers are applied.
//
//	ledger DIR PREFIX COUNT
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	wald "wald.dev/client/go"
)

type transfer struct {
	From   string `json:"from"`
	To     string `json:"to"`
	Amount int    `json:"amount"`
}

// transferOf: the transfers are the same in every run, so that a repeat has the same content.
func transferOf(number int) transfer {
	return transfer{
		From:   fmt.Sprintf("account%d", number*7%10),
		To:     fmt.Sprintf("account%d", (number*3+1)%10),
		Amount: number*13%100 + 1,
	}
}

func load(path string, state any) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(text, state)
}

// store writes all of the state or nothing, and flushes it to the device.
func store(path string, state any) error {
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	file, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func produce(ctx context.Context, client *wald.Client, directory, log string, half, count int) error {
	path := filepath.Join(directory, fmt.Sprintf("producer%d.json", half))
	state := struct {
		ID    string `json:"id"`
		LogID uint64 `json:"log_id"`
		Acked int    `json:"acked"`
	}{ID: rand.Text()}
	if err := load(path, &state); err != nil {
		return err
	}
	producer, err := client.Producer(ctx, log,
		wald.WithProducerID(state.ID, 0),
		wald.WithProducerLogID(state.LogID),
		wald.WithFirstSequence(uint64(state.Acked)))
	if err != nil {
		return err
	}
	// Before the first batch: without it the next start would be another producer.
	state.LogID = producer.LogID()
	if err := store(path, state); err != nil {
		return err
	}
	var pending []*wald.Pending[wald.LogAck]
	for number := state.Acked; number < count; number++ {
		text, err := json.Marshal(transferOf(2*number + half))
		if err != nil {
			return err
		}
		sent, err := producer.Send(ctx, []wald.Record{{Data: text}})
		if err != nil {
			return err
		}
		pending = append(pending, sent)
		time.Sleep(time.Millisecond)
		for len(pending) > 32 || len(pending) > 0 && number == count-1 {
			if _, err := pending[0].Wait(ctx); err != nil {
				return err
			}
			pending = pending[1:]
			state.Acked++
			if state.Acked%20 == 0 || len(pending) == 0 {
				if err := store(path, state); err != nil {
					return err
				}
			}
		}
	}
	return producer.Close(ctx)
}

type ledger struct {
	Cursor   []byte         `json:"cursor"`
	Applied  int            `json:"applied"`
	Balances map[string]int `json:"balances"`
}

func follow(ctx context.Context, client *wald.Client, directory, prefix string, count int) (*ledger, error) {
	path := filepath.Join(directory, "ledger.json")
	state := &ledger{Balances: make(map[string]int)}
	if err := load(path, state); err != nil || state.Applied >= count {
		return state, err
	}
	var options []wald.ScanOption
	if state.Cursor != nil {
		options = append(options, wald.After(state.Cursor))
	}
	follower := client.Follow(ctx, wald.Prefix(prefix), options...)
	defer follower.Close()
	for follower.Next(ctx) {
		event := follower.Event()
		if len(event.Gaps) > 0 {
			return nil, fmt.Errorf("records are missing: %v", event.Gaps)
		}
		for _, record := range event.Records() {
			var move transfer
			if err := json.Unmarshal(record.Data, &move); err != nil {
				return nil, err
			}
			state.Balances[move.From] -= move.Amount
			state.Balances[move.To] += move.Amount
			state.Applied++
		}
		// Effects and cursor together.
		state.Cursor = event.Cursor
		if err := store(path, state); err != nil {
			return nil, err
		}
		if state.Applied >= count {
			return state, nil
		}
	}
	return nil, follower.Err()
}

func run(directory, prefix, total string) error {
	count, err := strconv.Atoi(total)
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
	for half := range 2 {
		log := fmt.Sprintf("%s%d", prefix, half)
		go func() { done <- produce(ctx, client, directory, log, half, count/2) }()
	}
	state, err := follow(ctx, client, directory, prefix, count)
	if err := errors.Join(err, <-done, <-done); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"applied": state.Applied, "balances": state.Balances})
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
