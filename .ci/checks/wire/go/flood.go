package main

import (
	"bytes"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"

	wald "wald.dev/client/go/waldv1"
)

// repeated writes frames, again and again; it returns their number.
type repeated func(r *raw) (count int)

// flooding writes `first` on a connection and then repeats `again`.
type flooding struct {
	first func(r *raw)
	again repeated
	// The answers are not read.
	unread bool
}

// many repeats one frame.
func many(count int, write func(frames *http2.Framer)) repeated {
	return func(r *raw) int {
		for range count {
			write(r.out)
		}
		return count
	}
}

func opened(path string) func(r *raw) {
	return func(r *raw) { r.call(path, []byte{}, false) }
}

func nothing(*raw) {}

// callsWith opens calls, each followed by the frames of `then`.
func callsWith(path string, body []byte, then func(frames *http2.Framer, stream uint32)) repeated {
	return func(r *raw) int {
		const calls = 100
		for range calls {
			then(r.out, r.call(path, body, true))
		}
		return calls
	}
}

func reset(frames *http2.Framer, stream uint32) {
	_ = frames.WriteRSTStream(stream, http2.ErrCodeCancel)
}

func appendOf(log string, size int) []byte {
	return message(&wald.AppendRequest{Log: log, Record: record(size)})
}

func follow(log string) []byte {
	return message(&wald.ScanRequest{Selector: &wald.ScanRequest_Log{Log: log}, Follow: true})
}

var eight = [8]byte{1, 2, 3, 4, 5, 6, 7, 8}

func floods() map[string]flooding {
	ping := func(ack bool) repeated { return many(2000, func(f *http2.Framer) { _ = f.WritePing(ack, eight) }) }
	settings := many(2000, func(f *http2.Framer) { _ = f.WriteSettings() })
	empty := many(2000, func(f *http2.Framer) { _ = f.WriteData(1, false, nil) })
	return map[string]flooding{
		"nothing":     {nothing, func(*raw) int { time.Sleep(50 * time.Millisecond); return 0 }, false},
		"ping":        {nothing, ping(false), false},
		"ping-unread": {nothing, ping(false), true},
		"ping-ack":    {nothing, ping(true), false},
		// Calls, which need frames next to their data, and many more of those.
		"ping-ack-calls": {nothing, func(r *raw) int {
			r.call("/a.B/C", nil, true)
			return 1 + ping(true)(r)
		}, false},
		"settings":           {nothing, settings, false},
		"settings-unread":    {nothing, settings, true},
		"priority":           {nothing, many(2000, func(f *http2.Framer) { _ = f.WritePriority(3, http2.PriorityParam{Weight: 16}) }), false},
		"unknown-frame":      {nothing, many(1000, func(f *http2.Framer) { _ = f.WriteRawFrame(0xfa, 0, 0, make([]byte, 100)) }), false},
		"window-update":      {nothing, many(2000, func(f *http2.Framer) { _ = f.WriteWindowUpdate(0, 1) }), false},
		"empty-data":         {opened(wal + "Append"), empty, false},
		"empty-data-session": {opened(wal + "AppendSession"), empty, false},
		"padded-data":        {opened(wal + "AppendSession"), many(2000, func(f *http2.Framer) { _ = f.WriteDataPadded(1, false, nil, []byte{}) }), false},
		"empty-messages":     {opened(wal + "AppendSession"), many(50, func(f *http2.Framer) { _ = f.WriteData(1, false, bytes.Repeat(prefix(0), 10)) }), false},
		"continuation": {func(r *raw) {
			_ = r.out.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: r.headers(wal + "Append")})
		}, many(1, func(f *http2.Framer) { _ = f.WriteContinuation(1, false, bytes.Repeat([]byte("\x00\x01a\x01b"), 3000)) }), false},
		"empty-continuation": {func(r *raw) {
			_ = r.out.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: r.headers(wal + "Append")})
		}, many(2000, func(f *http2.Framer) { _ = f.WriteContinuation(1, false, nil) }), false},
		"reset-scan":    {nothing, callsWith(wal+"Scan", follow("bystander"), reset), false},
		"reset-append":  {nothing, callsWith(wal+"Append", appendOf("flood", 1), reset), false},
		"reset-headers": {nothing, callsWith(wal+"Append", []byte{}, reset), false},
		// The server is made to reset: a window update of 0, data behind the end, an unknown service.
		"made-to-reset-window": {nothing, callsWith(wal+"Scan", follow("bystander"), func(f *http2.Framer, stream uint32) {
			_ = f.WriteRawFrame(http2.FrameWindowUpdate, 0, stream, make([]byte, 4))
		}), false},
		"made-to-reset-data": {nothing, callsWith(wal+"Scan", follow("bystander"), func(f *http2.Framer, stream uint32) {
			_ = f.WriteData(stream, false, []byte("x"))
		}), false},
		"unknown-service": {nothing, callsWith("/a.B/C", []byte{}, func(f *http2.Framer, stream uint32) {
			_ = f.WriteData(stream, false, make([]byte, 1000))
		}), false},
		// One large field that is in the table, then thousands of references to it.
		"hpack-bomb": {func(r *raw) {
			block := append(r.headers(wal+"Append"), 0x40, 1, 'a', 0x7f, 3773&0x7f|0x80, 3773>>7)
			block = append(block, bytes.Repeat([]byte("x"), 3900)...)
			_ = r.out.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block, EndHeaders: true})
			r.next = 3
		}, func(r *raw) int {
			for range 10 {
				_ = r.out.WriteHeaders(http2.HeadersFrameParam{
					StreamID: r.next, BlockFragment: bytes.Repeat([]byte{0xbe}, 12000), EndHeaders: true, EndStream: true,
				})
				r.next += 2
			}
			return 10
		}, false},
	}
}

type floodResult struct {
	Kind        string `json:"kind"`
	Connections int64  `json:"connections"`
	Frames      int64  `json:"frames"`
	Bytes       int64  `json:"bytes"`
	// How the first connection that ended did so.
	Ended string `json:"ended"`
}

// flood sends frames on connections. It opens a connection again when the daemon ends it.
func flood(flags *flag.FlagSet) func([]string) error {
	seconds := flags.Duration("seconds", 2*time.Second, "time of the flood")
	connections := flags.Int("connections", 2, "connections at a time")
	list := flags.Bool("list", false, "print the kinds")
	return func(arguments []string) error {
		kinds := floods()
		if *list {
			names := []string{}
			for name := range kinds {
				names = append(names, name)
			}
			return told(names)
		}
		kind, found := kinds[arguments[0]]
		if !found {
			return fmt.Errorf("no such flood: %s", arguments[0])
		}
		result := floodResult{Kind: arguments[0]}
		var mutex sync.Mutex
		var waiting sync.WaitGroup
		until := time.Now().Add(*seconds)
		for range *connections {
			waiting.Go(func() {
				for time.Now().Before(until) {
					ended := floodOnce(arguments[1], kind, until, &result)
					mutex.Lock()
					if result.Ended == "" {
						result.Ended = ended
					}
					mutex.Unlock()
				}
			})
		}
		waiting.Wait()
		return told(result)
	}
}

func floodOnce(address string, kind flooding, until time.Time, result *floodResult) string {
	r, err := open(address, 0)
	if err != nil {
		time.Sleep(10 * time.Millisecond)
		return err.Error()
	}
	defer r.Close()
	atomic.AddInt64(&result.Connections, 1)
	_ = r.SetDeadline(until.Add(100 * time.Millisecond))
	var goaway atomic.Value
	if !kind.unread {
		go func() {
			for {
				frame, err := r.in.ReadFrame()
				if _, wrong := err.(http2.StreamError); err != nil && !wrong {
					return
				}
				if away, is := frame.(*http2.GoAwayFrame); is && away.ErrCode != http2.ErrCodeNo {
					goaway.Store(fmt.Sprintf("GOAWAY %v %s", away.ErrCode, away.DebugData()))
				}
			}
		}()
	}
	kind.first(r)
	if err := r.flush(); err != nil {
		return err.Error()
	}
	for time.Now().Before(until) {
		count := kind.again(r)
		bytes := int64(r.pending.Len())
		if err := r.flush(); err != nil {
			if away := goaway.Load(); away != nil {
				return away.(string)
			}
			return err.Error()
		}
		atomic.AddInt64(&result.Frames, int64(count))
		atomic.AddInt64(&result.Bytes, bytes)
		if away := goaway.Load(); away != nil {
			return away.(string)
		}
	}
	return ""
}
