package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	wald "wald.dev/client/go"
	"wald.dev/client/go/waldv1"
)

type action func(context.Context, *run, *arguments) (object, error)

var actions map[string]action

func init() {
	actions = map[string]action{
		"append":          appendOne,
		"append_batch":    appendBatch,
		"session":         session,
		"read":            read,
		"scan":            scan,
		"follow":          follow,
		"followed":        followed,
		"unfollow":        unfollow,
		"tail":            tail,
		"fence":           fence,
		"trim":            trim,
		"sync":            syncLog,
		"create_log":      createLog,
		"delete_log":      deleteLog,
		"commit_cursor":   commitCursor,
		"get_cursor":      getCursor,
		"delete_cursor":   deleteCursor,
		"list_cursors":    listCursors,
		"connect":         connect,
		"consume":         consume,
		"update_log":      updateLog,
		"get_log":         getLog,
		"list_producers":  listProducers,
		"forget_producer": forgetProducer,
		"close_producer":  closeProducer,
		"defaults":        defaults,
		"producer":        producer,
		"produce":         produce,
		"produce_many":    produceMany,
		"join":            join,
		"control":         control,
		"wait_tail":       waitTail,
	}
}

// Maximum wait of `followed` and `wait_tail`.
const patience = 20 * time.Second

// connect makes another client, and asks for the tail of a log.
func connect(ctx context.Context, _ *run, a *arguments) (object, error) {
	endpoint := a.text("endpoint")
	file := func(name, variable string) string {
		if a.has(name) {
			return a.text(name)
		}
		return os.Getenv(variable)
	}
	options := []wald.DialOption{wald.WithTimeout(1900 * time.Millisecond)}
	if strings.HasPrefix(endpoint, "https://") {
		options = append(options, wald.WithTLSCA(file("ca", "WALD_TLS_CA")),
			wald.WithTLSCert(file("cert", "WALD_TLS_CERT"), file("key", "WALD_TLS_KEY")),
			wald.WithServerName(a.text("server_name")))
	}
	if a.has("token") {
		options = append(options, wald.WithToken(a.text("token")))
	}
	if a.err != nil {
		return nil, a.err
	}
	client, err := wald.Dial(endpoint, options...)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	_, err = client.Tail(ctx, "conformance/none")
	if errors.Is(err, wald.ErrLogNotFound) {
		err = nil
	}
	return object{"connected": err == nil}, err
}

func appendOne(ctx context.Context, r *run, a *arguments) (object, error) {
	records := records(a, []any{a.members["record"]})
	options := []wald.AppendOption{
		wald.If(condition(a.members["condition"], a)),
		wald.WithDurability(durability(a)),
	}
	if a.err != nil {
		return nil, a.err
	}
	ack, err := r.client.Append(ctx, a.text("log"), records[0], options...)
	return object{
		"lsn":            num(ack.LSN),
		"deduplicated":   ack.Deduplicated,
		"durability":     shortName(ack.Durability, "DURABILITY_"),
		"durable_lsn":    num(ack.DurableLSN),
		"replicated_lsn": num(ack.ReplicatedLSN),
		"log_id":         num(ack.LogID),
	}, err
}

func appendBatch(ctx context.Context, r *run, a *arguments) (object, error) {
	batch := batch(a)
	if a.err != nil {
		return nil, a.err
	}
	ack, err := r.client.AppendBatch(ctx, batch)
	return describeAck(ack), err
}

func describeAck(ack wald.BatchAck) object {
	appends := []any{}
	for _, part := range ack.Appends {
		appends = append(appends, object{
			"log":          part.Log,
			"first_lsn":    num(part.FirstLSN),
			"next_lsn":     num(part.NextLSN),
			"deduplicated": part.Deduplicated,
			"log_id":       num(part.LogID),
		})
	}
	return object{"appends": appends, "durability": shortName(ack.Durability, "DURABILITY_")}
}

func session(ctx context.Context, r *run, a *arguments) (object, error) {
	var batches []wald.Batch
	a.each("requests", func(request *arguments) { batches = append(batches, batch(request)) })
	if a.err != nil {
		return nil, a.err
	}
	session, err := r.client.Session(ctx)
	if err != nil {
		return nil, err
	}
	defer session.Close()
	var pending []*wald.Pending[wald.BatchAck]
	for _, batch := range batches {
		sent, err := session.Send(ctx, batch)
		if err != nil {
			// The session has failed already; the answers of earlier batches report it.
			break
		}
		pending = append(pending, sent)
	}
	closing := session.CloseSend(ctx)
	result := object{}
	acks := []any{}
	for i, sent := range pending {
		ack, err := sent.Wait(ctx)
		if err == nil {
			acks = append(acks, describeAck(ack))
			continue
		}
		var failure *wald.Error
		if result["error"] == nil && errors.As(err, &failure) {
			described := describe(failure)
			described["request"] = num(i)
			result["error"] = described
		}
	}
	if closing != nil && result["error"] == nil {
		return nil, closing
	}
	result["acks"] = acks
	return result, nil
}

func read(ctx context.Context, r *run, a *arguments) (object, error) {
	var options []wald.ReadOption
	for _, option := range rangeOptions(a) {
		options = append(options, option)
	}
	if a.has("wait_ms") {
		options = append(options, wald.Wait(time.Duration(a.number("wait_ms"))*time.Millisecond))
	}
	page, err := r.client.Read(ctx, a.text("log"), options...)
	list := []any{}
	for _, record := range page.Records {
		list = append(list, describeRecord("", record))
	}
	return object{
		"records":        list,
		"next_lsn":       num(page.NextLSN),
		"tail_lsn":       num(page.TailLSN),
		"first_lsn":      num(page.FirstLSN),
		"durable_lsn":    num(page.DurableLSN),
		"replicated_lsn": num(page.ReplicatedLSN),
	}, err
}

func rangeOptions(a *arguments) []wald.RangeOption {
	var options []wald.RangeOption
	if a.has("lsn") {
		options = append(options, wald.FromLSN(wald.LSN(a.number("lsn"))))
	}
	if a.has("timestamp_us") {
		options = append(options, wald.FromTime(time.UnixMicro(int64(a.number("timestamp_us")))))
	}
	if a.has("tail_offset") {
		options = append(options, wald.Last(a.number("tail_offset")))
	}
	if a.has("max_records") {
		options = append(options, wald.MaxRecords(uint32(a.number("max_records"))))
	}
	if a.has("log_id") {
		options = append(options, wald.OfLog(a.number("log_id")))
	}
	return options
}

func scanArguments(a *arguments) (wald.Selector, []wald.ScanOption) {
	selector := wald.AllLogs()
	switch {
	case a.has("log"):
		selector = wald.Log(a.text("log"))
	case a.has("prefix"):
		selector = wald.Prefix(a.text("prefix"))
	}
	var options []wald.ScanOption
	for _, option := range rangeOptions(a) {
		options = append(options, option)
	}
	if a.has("cursor") {
		options = append(options, wald.After(a.bytes("cursor")))
	}
	if a.has("until_lsn") {
		options = append(options, wald.UntilLSN(wald.LSN(a.number("until_lsn"))))
	}
	return selector, options
}

func scan(ctx context.Context, r *run, a *arguments) (object, error) {
	selector, options := scanArguments(a)
	scanner := r.client.Scan(ctx, selector, options...)
	defer scanner.Close()
	var seen seen
	for event, err := range scanner.Events(ctx) {
		if err != nil {
			return nil, err
		}
		seen.add(event)
	}
	return seen.describe(), nil
}

func tail(ctx context.Context, r *run, a *arguments) (object, error) {
	tail, err := r.client.Tail(ctx, a.text("log"), target(a)...)
	return object{
		"first_lsn":      num(tail.FirstLSN),
		"tail_lsn":       num(tail.TailLSN),
		"durable_lsn":    num(tail.DurableLSN),
		"replicated_lsn": num(tail.ReplicatedLSN),
		"writer_epoch":   num(tail.WriterEpoch),
		"log_id":         num(tail.LogID),
	}, err
}

func waitTail(ctx context.Context, r *run, a *arguments) (object, error) {
	wanted := wald.LSN(a.number("at_least"))
	for deadline := time.Now().Add(patience); ; {
		tail, err := r.client.Tail(ctx, a.text("log"))
		if err == nil && tail.TailLSN >= wanted {
			return object{}, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the tail is %d after %v (%v)", tail.TailLSN, patience, err)
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func target(a *arguments) []wald.TargetOption {
	if !a.has("log_id") {
		return nil
	}
	return []wald.TargetOption{wald.WithLogID(a.number("log_id"))}
}

func fence(ctx context.Context, r *run, a *arguments) (object, error) {
	options := target(a)
	if a.has("writer_epoch") {
		options = append(options, wald.ToEpoch(a.number("writer_epoch")))
	}
	fence, err := r.client.Fence(ctx, a.text("log"), options...)
	return object{
		"tail_lsn":     num(fence.TailLSN),
		"writer_epoch": num(fence.WriterEpoch),
		"log_id":       num(fence.LogID),
	}, err
}

func trim(ctx context.Context, r *run, a *arguments) (object, error) {
	first, err := r.client.Trim(ctx, a.text("log"), wald.LSN(a.number("before_lsn")), target(a)...)
	return object{"first_lsn": num(first)}, err
}

func syncLog(ctx context.Context, r *run, a *arguments) (object, error) {
	return object{}, r.client.Sync(ctx, a.text("log"))
}

func createLog(ctx context.Context, r *run, a *arguments) (object, error) {
	log, err := r.client.CreateLog(ctx, a.text("log"), nil)
	return object{"log_id": num(log.GetLogId())}, err
}

func updateLog(ctx context.Context, r *run, a *arguments) (object, error) {
	config := &wald.LogConfig{MaxRecordBytes: uint32(a.number("max_record_bytes"))}
	log, err := r.client.UpdateLog(ctx, a.text("log"), config, "max_record_bytes")
	return object{"max_record_bytes": num(uint64(log.GetConfig().GetMaxRecordBytes()))}, err
}

func getLog(ctx context.Context, r *run, a *arguments) (object, error) {
	log, err := r.client.GetLog(ctx, a.text("log"))
	return object{
		"log_id":           num(log.GetLogId()),
		"max_record_bytes": num(uint64(log.GetConfig().GetMaxRecordBytes())),
	}, err
}

func listProducers(ctx context.Context, r *run, a *arguments) (object, error) {
	options := append(target(a), wald.PageSize(uint32(a.number("page_size"))))
	list := []any{}
	for producer, err := range r.client.ListProducers(ctx, a.text("log"), options...) {
		if err != nil {
			return nil, err
		}
		list = append(list, object{
			"id":            producer.ID,
			"epoch":         num(producer.Epoch),
			"next_sequence": num(producer.NextSequence),
		})
	}
	return object{"producers": list}, nil
}

func forgetProducer(ctx context.Context, r *run, a *arguments) (object, error) {
	return object{}, r.client.ForgetProducer(ctx, a.text("log"), a.text("id"), target(a)...)
}

// defaults are the package's constants. A producer has no linger.
func defaults(context.Context, *run, *arguments) (object, error) {
	return object{
		"batches_in_flight": num(wald.DefaultBatchesInFlight),
		"bytes_in_flight":   num(wald.DefaultBytesInFlight),
		"linger_ms":         num(0),
		"attempts":          num(wald.DefaultRetryPolicy().MaxAttempts),
		"timeout_ms":        num(wald.DefaultTimeout.Milliseconds()),
		"retry_for_ms":      num(wald.DefaultDeliveryTimeout.Milliseconds()),
	}, nil
}

func deleteLog(ctx context.Context, r *run, a *arguments) (object, error) {
	return object{}, r.client.DeleteLog(ctx, a.text("log"), target(a)...)
}

func commitCursor(ctx context.Context, r *run, a *arguments) (object, error) {
	cursor, err := r.client.Cursors().Commit(ctx, cursorCommit(a))
	return describeCursor(cursor), err
}

func getCursor(ctx context.Context, r *run, a *arguments) (object, error) {
	cursor, err := r.client.Cursors().Get(ctx, a.text("log"), a.text("cursor"), target(a)...)
	return describeCursor(cursor), err
}

func describeCursor(cursor wald.Cursor) object {
	return object{"cursor": cursor.Name, "lsn": num(cursor.LSN), "log_id": num(cursor.LogID)}
}

func deleteCursor(ctx context.Context, r *run, a *arguments) (object, error) {
	return object{}, r.client.Cursors().Delete(ctx, a.text("log"), a.text("cursor"), target(a)...)
}

func listCursors(ctx context.Context, r *run, a *arguments) (object, error) {
	list := []any{}
	for cursor, err := range r.client.Cursors().List(ctx, a.text("log"), target(a)...) {
		if err != nil {
			return nil, err
		}
		list = append(list, describeCursor(cursor))
	}
	return object{"cursors": list}, nil
}

func join(ctx context.Context, r *run, a *arguments) (object, error) {
	r.mutex.Lock()
	done := r.jobs[a.text("job")]
	r.mutex.Unlock()
	select {
	case err := <-done:
		return object{}, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func control(ctx context.Context, _ *run, a *arguments) (object, error) {
	given := object{}
	for name, value := range a.members {
		if name != "do" && name != "action" && name != "as" {
			given[name] = value
		}
	}
	body, err := json.Marshal(given)
	if err != nil {
		return nil, err
	}
	url := os.Getenv("WALD_CONTROL") + "/" + a.text("action")
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, text)
	}
	return object{}, err
}

func durability(a *arguments) wald.Durability {
	name := a.text("durability")
	if name == "" {
		return 0
	}
	value, known := waldv1.Durability_value["DURABILITY_"+name]
	if !known {
		a.wrong("durability")
	}
	return wald.Durability(value)
}

func batch(a *arguments) wald.Batch {
	batch := wald.Batch{Durability: durability(a)}
	a.each("batches", func(part *arguments) {
		list, _ := part.members["records"].([]any)
		batch.Logs = append(batch.Logs, wald.LogBatch{
			Log:       part.text("log"),
			Records:   records(part, list),
			Condition: condition(part.members["condition"], part),
		})
	})
	a.each("checks", func(check *arguments) {
		batch.Checks = append(batch.Checks, wald.Check{
			Log:          check.text("log"),
			ExpectedLSN:  (*wald.LSN)(check.optional("expected_lsn")),
			MustExist:    check.flag("must_exist"),
			MustNotExist: check.flag("must_not_exist"),
			LogID:        check.optional("log_id"),
		})
	})
	a.each("cursors", func(cursor *arguments) {
		batch.Cursors = append(batch.Cursors, cursorCommit(cursor))
	})
	return batch
}

func cursorCommit(a *arguments) wald.CursorCommit {
	return wald.CursorCommit{
		Log:         a.text("log"),
		Cursor:      a.text("cursor"),
		LSN:         wald.LSN(a.number("lsn")),
		ExpectedLSN: (*wald.LSN)(a.optional("expected_lsn")),
		LogID:       a.optional("log_id"),
	}
}

func condition(value any, a *arguments) wald.Condition {
	members, _ := value.(object)
	given := &arguments{members: members}
	condition := wald.Condition{
		ExpectedLSN:  (*wald.LSN)(given.optional("expected_lsn")),
		MustExist:    given.flag("must_exist"),
		MustNotExist: given.flag("must_not_exist"),
		WriterEpoch:  given.optional("writer_epoch"),
		LogID:        given.optional("log_id"),
	}
	if producer, ok := members["producer"].(object); ok {
		sequence := &arguments{members: producer}
		condition.Sequence = &wald.Sequence{
			ProducerID: sequence.text("id"),
			Epoch:      sequence.number("epoch"),
			Number:     sequence.number("sequence"),
		}
		a.err = errors.Join(a.err, sequence.err)
	}
	a.err = errors.Join(a.err, given.err)
	return condition
}

// records are those that the forms in a case stand for.
func records(a *arguments, list []any) []wald.Record {
	var records []wald.Record
	for _, one := range list {
		switch form := one.(type) {
		case string:
			records = append(records, wald.Text(form))
		case object:
			given := &arguments{members: form}
			if given.has("repeat") {
				size := int(given.number("bytes"))
				for i := range given.number("repeat") {
					text := strconv.FormatUint(i, 10)
					dots := max(0, size-len(text))
					records = append(records, wald.Text(text+strings.Repeat(".", dots)))
				}
			} else {
				records = append(records, record(given))
			}
			a.err = errors.Join(a.err, given.err)
		default:
			a.wrong("record")
		}
	}
	return records
}

func record(a *arguments) wald.Record {
	record := wald.Text(a.text("data"))
	if a.has("timestamp_us") {
		record.Time = time.UnixMicro(int64(a.number("timestamp_us")))
	}
	if a.has("crc32c") {
		sum := uint32(a.number("crc32c"))
		record.CRC32C = &sum
	}
	headers, _ := a.members["headers"].([]any)
	for _, header := range headers {
		pair, ok := header.([]any)
		if !ok || len(pair) != 2 {
			a.wrong("headers")
			continue
		}
		record.Headers = append(record.Headers, wald.Header{
			Key:   fmt.Sprint(pair[0]),
			Value: []byte(fmt.Sprint(pair[1])),
		})
	}
	return record
}

func describeRecord(log string, record wald.Record) object {
	headers := []any{}
	for _, header := range record.Headers {
		headers = append(headers, []any{header.Key, string(header.Value)})
	}
	described := object{
		"lsn":          num(record.LSN),
		"data":         string(record.Data),
		"headers":      headers,
		"timestamp_us": num(record.Time.UnixMicro()),
	}
	if log != "" {
		described["log"] = log
	}
	return described
}
