package wald

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"wald.dev/client/go/waldv1"
)

// Visibility is which records a reader sees. Never half a batch.
type Visibility = waldv1.Visibility

const (
	// VisibleReplicated: only records that are in the bucket of a replica.
	VisibleReplicated = waldv1.Visibility_VISIBILITY_REPLICATED
	// VisibleDurable: only records that are flushed to the device.
	VisibleDurable = waldv1.Visibility_VISIBILITY_DURABLE
	// VisibleWritten: also records that are in the operating system only.
	VisibleWritten = waldv1.Visibility_VISIBILITY_WRITTEN
	// VisibleAccepted: also records that are in the daemon's memory only.
	VisibleAccepted = waldv1.Visibility_VISIBILITY_ACCEPTED
)

// ReadOption is a setting of [Client.Read].
type ReadOption interface{ applyRead(*waldv1.ReadRequest) }

// ScanOption is a setting of [Client.Scan] and [Client.Follow].
type ScanOption interface{ applyScan(*scanSettings) }

// RangeOption is a setting of [Client.Read], [Client.Scan] and [Client.Follow].
type RangeOption struct {
	read func(*waldv1.ReadRequest)
	scan func(*waldv1.ScanRequest)
}

func (o RangeOption) applyRead(request *waldv1.ReadRequest) { o.read(request) }
func (o RangeOption) applyScan(s *scanSettings)             { o.scan(s.request) }

// FromLSN begins at this lsn; one log only. Default: at the first record kept.
func FromLSN(lsn LSN) RangeOption {
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.Start = &waldv1.ReadRequest_Lsn{Lsn: uint64(lsn)} },
		scan: func(r *waldv1.ScanRequest) { r.Start = &waldv1.ScanRequest_Lsn{Lsn: uint64(lsn)} },
	}
}

// FromTime begins at the first record with this time or a later one.
func FromTime(at time.Time) RangeOption {
	micros := at.UnixMicro()
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.Start = &waldv1.ReadRequest_TimestampUs{TimestampUs: micros} },
		scan: func(r *waldv1.ScanRequest) { r.Start = &waldv1.ScanRequest_TimestampUs{TimestampUs: micros} },
	}
}

// Last begins count records before the tail; more than 0 for one log only.
func Last(count uint64) RangeOption {
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.Start = &waldv1.ReadRequest_TailOffset{TailOffset: count} },
		scan: func(r *waldv1.ScanRequest) { r.Start = &waldv1.ScanRequest_TailOffset{TailOffset: count} },
	}
}

// FromNow begins with records that are appended from now on.
func FromNow() RangeOption { return Last(0) }

// MaxRecords is the maximum number of records. Default: 100 for a read, no bound for a scan.
func MaxRecords(count uint32) RangeOption {
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.MaxRecords = count },
		scan: func(r *waldv1.ScanRequest) { r.MaxRecords = uint64(count) },
	}
}

// Visible is which records to see. Default: those that the log's sync mode acks.
func Visible(visibility Visibility) RangeOption {
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.Visibility = visibility },
		scan: func(r *waldv1.ScanRequest) { r.Visibility = visibility },
	}
}

// AnyNode lets any node of the store answer from its copy, which is usually a second old, and
// at most twice its lease_ttl. Readers then do not load the owner if the client begins with a
// stand-by. It implies the visibility REPLICATED. With [Last] or [FromNow] a follower begins at
// the tail of that copy, and ends with an error if the connection is lost before the first event.
func AnyNode() RangeOption {
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.AnyNode = true },
		scan: func(r *waldv1.ScanRequest) { r.AnyNode = true },
	}
}

// OfLog: the log must have this number, or LOG_REPLACED; one log only.
func OfLog(id uint64) RangeOption {
	return RangeOption{
		read: func(r *waldv1.ReadRequest) { r.LogId = &id },
		scan: func(r *waldv1.ScanRequest) { r.LogId = &id },
	}
}

type readOption func(*waldv1.ReadRequest)

func (o readOption) applyRead(request *waldv1.ReadRequest) { o(request) }

// MaxBytes is the maximum size of the records. Default: as many as keep the answer below 1 MiB.
func MaxBytes(bytes uint32) ReadOption {
	return readOption(func(r *waldv1.ReadRequest) { r.MaxBytes = bytes })
}

// Wait is how long to wait for a first record if there is none. Comes on top of the client's
// timeout, but not of the context's deadline.
func Wait(wait time.Duration) ReadOption {
	return readOption(func(r *waldv1.ReadRequest) { r.Wait = durationpb.New(wait) })
}

// Page is a bounded piece of one log.
type Page struct {
	// Records are consecutive.
	Records []Record
	// NextLSN is the lsn to read next: after the last record, else where the read began.
	NextLSN LSN
	// TailLSN is the tail at the visibility read with.
	TailLSN LSN
	// DurableLSN: every lsn of the log below it is flushed to the device.
	DurableLSN LSN
	// ReplicatedLSN: every lsn of the log below it is in the bucket of a replica; 0 without a replica.
	ReplicatedLSN LSN
	// FirstLSN is the first lsn kept.
	FirstLSN LSN
	// RecoveryEpoch rises with every unclean start of the server.
	RecoveryEpoch uint64
}

// Read reads a page of one log. It fails with TRIMMED below the first lsn kept, BEYOND_TAIL
// above the tail, QUARANTINED at damage.
func (c *Client) Read(ctx context.Context, log string, options ...ReadOption) (Page, error) {
	request := &waldv1.ReadRequest{Log: log}
	for _, option := range options {
		option.applyRead(request)
	}
	kind := reading
	kind.extra = request.GetWait().AsDuration()
	answer, failure := call(ctx, c, kind, c.wal.Read, request)
	if failure != nil {
		return Page{}, failure
	}
	if answer.NextLsn == nil || answer.TailLsn == nil {
		return Page{}, brokenContract("ReadResponse.next_lsn or tail_lsn").ofRead()
	}
	page := Page{
		NextLSN:       LSN(answer.GetNextLsn()),
		TailLSN:       LSN(answer.GetTailLsn()),
		DurableLSN:    LSN(answer.GetDurableLsn()),
		ReplicatedLSN: LSN(answer.GetReplicatedLsn()),
		FirstLSN:      LSN(answer.GetFirstLsn()),
		RecoveryEpoch: answer.GetRecoveryEpoch(),
	}
	if answer.GetBatch() != nil {
		batch, failure := readBatch(answer.GetBatch())
		if failure != nil {
			return Page{}, failure.ofRead()
		}
		page.Records = batch.Records
	}
	return page, nil
}
