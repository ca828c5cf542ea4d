// Package wald is the client of Wald, which keeps write-ahead logs for other programs.
//
//	client, err := wald.Dial("127.0.0.1:6925")
//	ack, err := client.Append(ctx, "orders", wald.Text("hello"))
//
// A [Client] appends, reads, administers. A [Session] pipelines appends. A [Producer]
// appends exactly once, whatever breaks. A [Follower] reads on as records arrive, whatever
// breaks. A [DurableProducer] and a [DurableFollower] keep their state, and go on after a
// restart of the program.
//
// Every failure is an [*Error]. It says whether a write was applied ([Error.Outcome]) and
// whether the same request may be sent again ([Error.Retry]); reasons are compared with
// [errors.Is]:
//
//	if errors.Is(err, wald.ErrPositionMismatch) { ... }
//
// The client repeats automatically, within its [RetryPolicy] and the deadline of the call:
// reads, after any passing failure; appends, when the server or the transport reports that
// nothing was applied; appends with an expected lsn or a producer also when the connection
// broke underway, because they cannot be applied twice. A plain append whose connection broke
// is not repeated: its outcome is unknown.
//
// Appends of a client share one stream; see [WithSharedAppends].
//
// Several nodes can share a store, which one of them owns. [Dial] takes a list of them. The client
// calls one at a time, and follows the owner.
//
// The stubs in waldv1 and the reasons of errors are made from the contract by `go generate ./...`.
package wald

//go:generate go run ./internal/generate
