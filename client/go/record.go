package wald

import (
	"hash/crc32"
	"time"

	"wald.dev/client/go/waldv1"
)

// LSN is the number of a record in its log: 0 for the first ever appended, then up by one
// with no gaps.
type LSN uint64

// Record is one record, to append or as read.
type Record struct {
	// Data is the payload.
	Data []byte
	// Headers are facts in addition to the payload, in order. A key may occur more than once.
	Headers []Header
	// Time is in UTC, to the microsecond. Zero in an append: the server's clock. Within a
	// log it never goes back; at most a minute ahead of the server's clock.
	Time time.Time
	// CRC32C is the CRC-32C of the payload. Given in an append, the server verifies it,
	// stores it, and returns it to readers.
	CRC32C *uint32
	// LSN is the record's number, of a record that was read.
	LSN LSN
}

// Header is one fact in addition to a record's payload.
type Header struct {
	Key   string
	Value []byte
}

// Bytes is a record with this payload.
func Bytes(data []byte) Record { return Record{Data: data} }

// Text is a record with this payload.
func Text(data string) Record { return Record{Data: []byte(data)} }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// WithChecksum is the record with the CRC-32C of its payload.
func (r Record) WithChecksum() Record {
	sum := crc32.Checksum(r.Data, castagnoli)
	r.CRC32C = &sum
	return r
}

// Intact reports whether the payload matches the producer's checksum. True if the producer gave
// none.
func (r Record) Intact() bool {
	return r.CRC32C == nil || crc32.Checksum(r.Data, castagnoli) == *r.CRC32C
}

// RecordBatch is consecutive records of one log.
type RecordBatch struct {
	Log     string
	LogID   uint64
	Records []Record
}

func (r Record) proto() *waldv1.Record {
	record := &waldv1.Record{
		Payload: &waldv1.Record_Data{Data: r.Data},
		Crc32C:  r.CRC32C,
	}
	if !r.Time.IsZero() {
		record.TimestampUs = r.Time.UnixMicro()
	}
	for _, header := range r.Headers {
		record.Headers = append(record.Headers, &waldv1.Header{Key: header.Key, Value: header.Value})
	}
	return record
}

func protoRecords(records []Record) []*waldv1.Record {
	list := make([]*waldv1.Record, len(records))
	for i, record := range records {
		list[i] = record.proto()
	}
	return list
}

func readBatch(batch *waldv1.RecordBatch) (RecordBatch, *Error) {
	if batch.FirstLsn == nil {
		return RecordBatch{}, brokenContract("RecordBatch.first_lsn")
	}
	result := RecordBatch{
		Log:     batch.GetLog(),
		LogID:   batch.GetLogId(),
		Records: make([]Record, len(batch.GetRecords())),
	}
	for i, record := range batch.GetRecords() {
		result.Records[i] = readRecord(record, batch, i)
	}
	return result, nil
}

func readRecord(record *waldv1.Record, batch *waldv1.RecordBatch, index int) Record {
	micros := record.GetTimestampUs()
	if micros == 0 {
		micros = batch.GetTimestampUs()
	}
	result := Record{
		Data:   record.GetData(),
		Time:   time.UnixMicro(micros).UTC(),
		CRC32C: record.Crc32C,
		LSN:    LSN(batch.GetFirstLsn() + uint64(index)),
	}
	for _, header := range record.GetHeaders() {
		result.Headers = append(result.Headers, Header{Key: header.GetKey(), Value: header.GetValue()})
	}
	return result
}
