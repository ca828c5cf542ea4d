// Command tour is the five minutes of the README: appends, reads back, appends exactly once,
// and follows.
package main

import (
	"context"
	"fmt"
	"log"

	wald "wald.dev/client/go"
)

func main() {
	if err := tour(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func tour(ctx context.Context) error {
	// The server that WALD_ENDPOINT names; wald.Dial takes an endpoint.
	client, err := wald.FromEnv()
	if err != nil {
		return err
	}
	defer client.Close()

	// Once this has answered, the record survives a power cut.
	first, err := client.Append(ctx, "greetings", wald.Text("hello"))
	if err != nil {
		return err
	}
	fmt.Println("appended", first.LSN)

	// A producer goes on through lost connections and restarts, and appends nothing twice.
	producer, err := client.Producer(ctx, "greetings")
	if err != nil {
		return err
	}
	for i := range 3 {
		if _, err := producer.Send(ctx, []wald.Record{wald.Text(fmt.Sprintf("greeting %d", i))}); err != nil {
			return err
		}
	}
	if err := producer.Close(ctx); err != nil {
		return err
	}

	// A follower gets existing records, then new ones. This one stops when it is caught up.
	follower := client.Follow(ctx, wald.Log("greetings"), wald.FromLSN(first.LSN))
	defer follower.Close()
	for follower.Next(ctx) {
		event := follower.Event()
		for _, record := range event.Records() {
			fmt.Printf("%d: %s\n", record.LSN, record.Data)
		}
		if event.CaughtUp {
			break
		}
	}
	return follower.Err()
}
