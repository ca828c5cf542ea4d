//go:build daemon

// The examples of the README, against the daemon at WALD_ENDPOINT:
//
//	go test -tags daemon -run Example .
package wald_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"time"

	wald "wald.dev/client/go"
)

// run calls an example with a log that nobody has.
func run(example func(context.Context, *wald.Client, string) error) {
	client, err := wald.FromEnv()
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := example(ctx, client, "examples/"+rand.Text()); err != nil {
		log.Fatal(err)
	}
}

func ExampleClient_Append() {
	run(appendRecord)
	// Output:
	// 0 DURABILITY_DURABLE
	// 1 true
}

func appendRecord(ctx context.Context, client *wald.Client, log string) error {
	ack, err := client.Append(ctx, log, wald.Text("hello"))
	if err != nil {
		return err
	}
	fmt.Println(ack.LSN, ack.Durability)

	record := wald.Record{
		Data:    []byte("with everything"),
		Headers: []wald.Header{{Key: "kind", Value: []byte("demo")}},
	}
	ack, err = client.Append(ctx, log, record.WithChecksum(), wald.ExpectLSN(1), wald.WithDurability(wald.Written))
	if err != nil {
		return err
	}
	fmt.Println(ack.LSN, ack.Durability >= wald.Written)
	return nil
}

func ExampleWithTLSCA() {
	// There is no such file.
	fmt.Println(errors.Is(connectSecurely(), wald.TLSSettings))
	// Output:
	// true
}

func connectSecurely() error {
	client, err := wald.Dial("https://wald.internal",
		wald.WithTLSCA("ca.pem"),                     // default: the CAs of the system
		wald.WithTLSCert("client.pem", "client.key"), // if the server requires a certificate
		wald.WithTokenFile("token"))                  // if the server requires a token
	if err != nil {
		return err
	}
	return client.Close()
}

func ExampleDial_severalNodes() {
	// The directory has no file of a CA.
	fmt.Println(errors.Is(connectToNodes(), wald.TLSSettings))
	// Output:
	// true
}

func connectToNodes() error {
	client, err := wald.Dial("https://wald-0.internal,https://wald-1.internal",
		wald.WithTLSCA("ca.pem"))
	if err != nil {
		return err
	}
	return client.Close()
}

func ExampleError() {
	run(understandErrors)
	// Output:
	// POSITION_MISMATCH true true
	// the tail is 1
}

func understandErrors(ctx context.Context, client *wald.Client, log string) error {
	if _, err := client.Append(ctx, log, wald.Text("one"), wald.ExpectLSN(0)); err != nil {
		return err
	}
	_, err := client.Append(ctx, log, wald.Text("two"), wald.ExpectLSN(0))

	var failure *wald.Error
	if !errors.As(err, &failure) {
		return err
	}
	if errors.Is(err, wald.ErrPositionMismatch) {
		fmt.Println(failure.Reason, failure.Outcome == wald.NotApplied, failure.Retry == wald.Never)
		tail, _ := failure.Number("actual_lsn")
		fmt.Println("the tail is", tail)
	}
	return nil
}

func ExampleClient_AppendBatch() {
	run(appendBatch)
	// Output:
	// 0..2
	// 0..1
}

func appendBatch(ctx context.Context, client *wald.Client, log string) error {
	ack, err := client.AppendBatch(ctx, wald.Batch{
		Logs: []wald.LogBatch{
			{Log: log + "/orders", Records: []wald.Record{wald.Text("a"), wald.Text("b")}},
			{Log: log + "/audit", Records: []wald.Record{wald.Text("two orders")},
				Condition: wald.Condition{MustNotExist: true}},
		},
		Checks: []wald.Check{{Log: log + "/closed", MustNotExist: true}},
	})
	if err != nil {
		return err
	}
	for _, part := range ack.Appends {
		fmt.Printf("%d..%d\n", part.FirstLSN, part.NextLSN)
	}
	return nil
}

func ExampleClient_Read() {
	run(readRecords)
	// Output:
	// [b c] next 3 of 3
	// 0: a
	// 1: b
	// 2: c
}

func readRecords(ctx context.Context, client *wald.Client, log string) error {
	for _, text := range []string{"a", "b", "c"} {
		if _, err := client.Append(ctx, log, wald.Text(text)); err != nil {
			return err
		}
	}

	page, err := client.Read(ctx, log, wald.Last(2), wald.Wait(time.Second))
	if err != nil {
		return err
	}
	var texts []string
	for _, record := range page.Records {
		texts = append(texts, string(record.Data))
	}
	fmt.Println(texts, "next", page.NextLSN, "of", page.TailLSN)

	scanner := client.Scan(ctx, wald.Prefix(log))
	defer scanner.Close()
	for event, err := range scanner.Events(ctx) {
		if err != nil {
			return err
		}
		for _, record := range event.Records() {
			fmt.Printf("%d: %s\n", record.LSN, record.Data)
		}
	}
	return nil
}

func ExampleClient_Follow() {
	run(followRecords)
	// Output:
	// 0: a
	// 1: b
	// missing: none, resumed: 2: c
}

func followRecords(ctx context.Context, client *wald.Client, log string) error {
	texts := []wald.Record{wald.Text("a"), wald.Text("b")}
	if _, err := client.AppendBatch(ctx, wald.Batch{Logs: []wald.LogBatch{{Log: log, Records: texts}}}); err != nil {
		return err
	}

	follower := client.Follow(ctx, wald.Log(log))
	defer follower.Close()
	missing := "none"
	for follower.Next(ctx) {
		event := follower.Event()
		for _, gap := range event.Gaps {
			missing = fmt.Sprint(gap.Reason)
		}
		for _, record := range event.Records() {
			fmt.Printf("%d: %s\n", record.LSN, record.Data)
		}
		if event.CaughtUp {
			break
		}
	}
	if err := follower.Err(); err != nil {
		return err
	}

	// Keep the cursor with the results of the records; another process continues exactly there.
	if _, err := client.Append(ctx, log, wald.Text("c")); err != nil {
		return err
	}
	resumed := client.Follow(ctx, wald.Log(log), wald.After(follower.Cursor()))
	defer resumed.Close()
	if !resumed.Next(ctx) {
		return resumed.Err()
	}
	for _, record := range resumed.Event().Records() {
		fmt.Printf("missing: %s, resumed: %d: %s\n", missing, record.LSN, record.Data)
	}
	return nil
}

func ExampleClient_Session() {
	run(pipeline)
	// Output:
	// 0
	// 1
	// 2
}

func pipeline(ctx context.Context, client *wald.Client, log string) error {
	session, err := client.Session(ctx)
	if err != nil {
		return err
	}
	defer session.Close()
	var pending []*wald.Pending[wald.BatchAck]
	for _, text := range []string{"a", "b", "c"} {
		sent, err := session.Send(ctx, wald.Batch{
			Logs: []wald.LogBatch{{Log: log, Records: []wald.Record{wald.Text(text)}}},
		})
		if err != nil {
			return err
		}
		pending = append(pending, sent)
	}
	if err := session.CloseSend(ctx); err != nil {
		return err
	}
	for _, sent := range pending {
		ack, err := sent.Wait(ctx)
		if err != nil {
			return err
		}
		fmt.Println(ack.Appends[0].FirstLSN)
	}
	return nil
}

func ExampleClient_DurableProducer() {
	run(func(ctx context.Context, client *wald.Client, log string) error {
		return inDirectory(func(directory string) error {
			// The second start finds that nothing is left to do.
			for range 2 {
				if err := produceOrders(ctx, client, log, directory); err != nil {
					return err
				}
			}
			tail, err := client.Tail(ctx, log)
			fmt.Println(tail.TailLSN, "orders")
			return err
		})
	})
	// Output:
	// 100 orders
}

func inDirectory(example func(directory string) error) error {
	directory, err := os.MkdirTemp("", "wald")
	if err != nil {
		return err
	}
	return errors.Join(example(directory), os.RemoveAll(directory))
}

func produceOrders(ctx context.Context, client *wald.Client, log, directory string) error {
	state := wald.FileState(filepath.Join(directory, "orders.state"))
	orders, err := client.DurableProducer(ctx, log, state)
	if err != nil {
		return err
	}
	for number := orders.NextSequence(); number < 100; number++ {
		if _, err := orders.AppendBatch(ctx, wald.Text(fmt.Sprint("order ", number))); err != nil {
			return err
		}
	}
	return orders.Close(ctx)
}

func ExampleClient_DurableFollower() {
	run(func(ctx context.Context, client *wald.Client, log string) error {
		return inDirectory(func(directory string) error {
			for next := range wald.LSN(3) {
				if _, err := client.Append(ctx, log, wald.Text("an order")); err != nil {
					return err
				}
				if err := countOrders(ctx, client, log, directory, next+1); err != nil {
					return err
				}
			}
			return nil
		})
	})
	// Output:
	// 1 orders
	// 2 orders
	// 3 orders
}

func countOrders(ctx context.Context, client *wald.Client, log, directory string, end wald.LSN) error {
	state := wald.FileState(filepath.Join(directory, "count.state"))
	orders, err := client.DurableFollower(ctx, wald.Log(log), state, wald.UntilLSN(end))
	if err != nil {
		return err
	}
	defer orders.Close()
	count, _ := strconv.Atoi(string(orders.Effects())) // 0 at the first start
	for orders.Next(ctx) {
		for range orders.Event().Records() {
			count++
		}
		if err := orders.Keep([]byte(strconv.Itoa(count))); err != nil {
			return err
		}
		fmt.Println(count, "orders")
	}
	return orders.Err()
}

func ExampleClient_Fence() {
	run(takeOver)
	// Output:
	// epoch 1, tail 1
	// by the old writer
	// 1
	// the old writer stops
}

func takeOver(ctx context.Context, client *wald.Client, log string) error {
	if _, err := client.Append(ctx, log, wald.Text("by the old writer")); err != nil {
		return err
	}

	fence, err := client.Fence(ctx, log)
	if err != nil {
		return err
	}
	fmt.Printf("epoch %d, tail %d\n", fence.WriterEpoch, fence.TailLSN)

	// Nothing of older writers comes any more: read all that they wrote, and only then write.
	old := client.Scan(ctx, wald.Log(log), wald.UntilLSN(fence.TailLSN))
	defer old.Close()
	for event, err := range old.Events(ctx) {
		if err != nil {
			return err
		}
		for _, record := range event.Records() {
			fmt.Printf("%s\n", record.Data)
		}
	}
	ack, err := client.Append(ctx, log, wald.Text("by the new writer"), wald.AsWriter(fence.WriterEpoch))
	if err != nil {
		return err
	}
	fmt.Println(ack.LSN)

	_, err = client.Append(ctx, log, wald.Text("late"), wald.AsWriter(fence.WriterEpoch-1))
	if errors.Is(err, wald.ErrFenced) {
		fmt.Println("the old writer stops")
	}
	return nil
}

func ExampleClient_Cursors() {
	run(consume)
	// Output:
	// billing goes on at 1
}

func consume(ctx context.Context, client *wald.Client, log string) error {
	if _, err := client.Append(ctx, log, wald.Text("an order")); err != nil {
		return err
	}

	// Store the result of the records and the position in one step.
	from := wald.LSN(0)
	_, err := client.AppendBatch(ctx, wald.Batch{
		Logs:    []wald.LogBatch{{Log: log + "/bills", Records: []wald.Record{wald.Text("a bill")}}},
		Cursors: []wald.CursorCommit{{Log: log, Cursor: "billing", LSN: 1, ExpectedLSN: &from}},
	})
	if err != nil {
		return err
	}
	cursor, err := client.Cursors().Get(ctx, log, "billing")
	if err != nil {
		return err
	}
	fmt.Println(cursor.Name, "goes on at", cursor.LSN)
	return nil
}

func ExampleClient_CreateLog() {
	run(administer)
	// Output:
	// 1 of 2 kept
	// 1 log
}

func administer(ctx context.Context, client *wald.Client, log string) error {
	created, err := client.CreateLog(ctx, log, &wald.LogConfig{MaxRecordBytes: 1000})
	if err != nil {
		return err
	}
	for _, text := range []string{"a", "b"} {
		if _, err := client.Append(ctx, log, wald.Text(text)); err != nil {
			return err
		}
	}
	// With the log's number nothing of this can hit another log of the same name.
	if _, err := client.Trim(ctx, log, 1, wald.WithLogID(created.GetLogId())); err != nil {
		return err
	}
	tail, err := client.Tail(ctx, log)
	if err != nil {
		return err
	}
	fmt.Println(tail.TailLSN-tail.FirstLSN, "of", tail.TailLSN, "kept")

	count := 0
	for _, err := range client.ListLogs(ctx, log) {
		if err != nil {
			return err
		}
		count++
	}
	fmt.Println(count, "log")
	return client.DeleteLog(ctx, log, wald.WithLogID(created.GetLogId()))
}
