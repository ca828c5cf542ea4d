package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	wald "wald.dev/client/go"
)

// Number of batches that a chaos producer has in flight.
const chaosInFlight = 32

// chaosProducer appends numbered records until the file WALD_STOP is there.
func chaosProducer(ctx context.Context, log, id, rate string) error {
	perSecond, err := strconv.ParseFloat(rate, 64)
	if err != nil || perSecond <= 0 {
		return fmt.Errorf("%q is no rate", rate)
	}
	client, err := wald.FromEnv()
	if err != nil {
		return err
	}
	defer client.Close()
	producer, err := client.Producer(ctx, log, wald.WithProducerID(id, 1), wald.WithInFlight(chaosInFlight, 8<<20))
	if err != nil {
		return err
	}
	defer producer.Close(ctx)
	ticker := time.NewTicker(time.Duration(float64(time.Second) / perSecond))
	defer ticker.Stop()
	var pending []*wald.Pending[wald.LogAck]
	total := 0
	for ; !stopped(); total++ {
		<-ticker.C
		for len(pending) == chaosInFlight || len(pending) > 0 && isDone(pending[0]) {
			if _, err := pending[0].Wait(ctx); err != nil {
				return err
			}
			pending = pending[1:]
		}
		sent, err := producer.Send(ctx, []wald.Record{wald.Text(fmt.Sprintf("%s:%d", id, total))})
		if err != nil {
			return err
		}
		pending = append(pending, sent)
	}
	for _, sent := range pending {
		if _, err := sent.Wait(ctx); err != nil {
			return err
		}
	}
	if _, err := producer.Append(ctx, []wald.Record{wald.Text("END:" + id)}); err != nil {
		return err
	}
	fmt.Println(id, total)
	return nil
}

func stopped() bool {
	_, err := os.Stat(os.Getenv("WALD_STOP"))
	return err == nil
}

func isDone(sent *wald.Pending[wald.LogAck]) bool {
	select {
	case <-sent.Done():
		return true
	default:
		return false
	}
}

// chaosFollower prints the records it sees, until it has seen count ends.
func chaosFollower(ctx context.Context, prefix, count string) error {
	remaining, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	client, err := wald.FromEnv()
	if err != nil {
		return err
	}
	defer client.Close()
	follower := client.Follow(ctx, wald.Prefix(prefix))
	defer follower.Close()
	for remaining > 0 && follower.Next(ctx) {
		event := follower.Event()
		for _, gap := range event.Gaps {
			to := "-"
			if gap.ToLSN != nil {
				to = fmt.Sprint(*gap.ToLSN)
			}
			fmt.Println("GAP", gap.Log, gap.FromLSN, to, shortName(gap.Reason, "GAP_REASON_"))
		}
		for log, record := range event.Records() {
			fmt.Println(log, record.LSN, string(record.Data))
			if bytes.HasPrefix(record.Data, []byte("END:")) {
				remaining--
			}
		}
	}
	return follower.Err()
}
