package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/protobuf/types/known/durationpb"

	wald "wald.dev/client/go/waldv1"
)

var noWindow = http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}

// fill appends three records of 900 kB to the log `big`.
func fill(address string, count int) error {
	connection, service, err := dial(address)
	if err != nil {
		return err
	}
	defer connection.Close()
	data := make([]byte, 900_000)
	for at := range data {
		data[at] = byte(rand.Uint32())
	}
	for range count {
		one := &wald.Record{Payload: &wald.Record_Data{Data: data}}
		if _, err := service.Append(ctx, &wald.AppendRequest{Log: "big", Record: one}); err != nil {
			return err
		}
	}
	return nil
}

// peer describes a client that stops midway: its bytes, and whether it answers pings.
type peer struct {
	bytes    []byte
	call     string
	body     []byte
	end      bool
	settings []http2.Setting
	pongs    bool
}

func peers() map[string]peer {
	scan := func(follow bool) []byte {
		return message(&wald.ScanRequest{Selector: &wald.ScanRequest_Log{Log: "big"}, Follow: follow})
	}
	read := message(&wald.ReadRequest{Log: "big"})
	waiting := message(&wald.ReadRequest{Log: "big", Start: &wald.ReadRequest_Lsn{Lsn: 3}, Wait: durationpb.New(time.Minute)})
	session := message(request(1, "small", 10))
	shut := []http2.Setting{noWindow}
	wide := []http2.Setting{{ID: http2.SettingInitialWindowSize, Val: 1 << 30}}
	return map[string]peer{
		"idle":                 {pongs: true},
		"idle-frozen":          {},
		"silent":               {bytes: []byte{}},
		"half-preface":         {bytes: []byte(http2.ClientPreface[:5])},
		"read-unread":          {call: wal + "Read", body: read, end: true, settings: shut, pongs: true},
		"scan-unread":          {call: wal + "Scan", body: scan(false), end: true, settings: shut, pongs: true},
		"scan-unread-frozen":   {call: wal + "Scan", body: scan(false), end: true, settings: shut},
		"follow-unread":        {call: wal + "Scan", body: scan(true), end: true, settings: shut, pongs: true},
		"follow":               {call: wal + "Scan", body: scan(true), end: true, settings: wide, pongs: true},
		"append-announced":     {call: wal + "Append", body: []byte("\x00\x00\x00\x01\x00"), settings: shut, pongs: true},
		"append-headers":       {call: wal + "Append", body: []byte{}, settings: shut, pongs: true},
		"read-waits":           {call: wal + "Read", body: waiting, end: true, pongs: true},
		"session-idle":         {call: wal + "AppendSession", body: []byte{}, pongs: true},
		"session-acks-unread":  {call: wal + "AppendSession", body: session, settings: shut, pongs: true},
		"session-half-message": {call: wal + "AppendSession", body: []byte("\x00\x00\x00\x01\x00aaa"), pongs: true},
		"health-watch-unread":  {call: health + "Watch", body: prefix(0), end: true, settings: shut, pongs: true},
		"health-watch":         {call: health + "Watch", body: prefix(0), end: true, pongs: true},
		"reflection-idle":      {call: reflection, body: []byte{}, pongs: true},
		"reflection-unread":    {call: reflection, body: append(prefix(3), "\x3a\x01*"...), settings: shut, pongs: true},
		"verify-unread":        {call: ops + "Verify", body: prefix(0), end: true, settings: shut, pongs: true},
		"backup-unread":        {call: ops + "Backup", body: prefix(0), end: true, settings: shut, pongs: true},
		"tail-request-open":    {call: wal + "GetTail", body: []byte{}, pongs: true},
		"unknown-request-open": {call: "/a.B/C", body: []byte{}, pongs: true},
	}
}

// begin opens the peer's connection and sends the peer's bytes.
func (p peer) begin(address string) (io.Closer, error) {
	if p.bytes != nil {
		connection, err := connect(address, 0)
		if err == nil {
			_, err = connection.Write(p.bytes)
		}
		return connection, err
	}
	r, err := open(address, 0, p.settings...)
	if err != nil {
		return nil, err
	}
	if p.call != "" {
		r.call(p.call, p.body, p.end)
		if err := r.flush(); err != nil {
			return nil, err
		}
	}
	if p.pongs {
		go func() {
			for {
				frame, err := r.in.ReadFrame()
				var wrong http2.StreamError
				if err != nil && !errors.As(err, &wrong) {
					return
				}
				if ping, is := frame.(*http2.PingFrame); is && !ping.IsAck() {
					_ = r.out.WritePing(true, ping.Data)
					_ = r.flush()
				}
			}
		}()
	}
	return r, nil
}

// stuck holds one peer of a kind until standard input ends.
func stuck(flags *flag.FlagSet) func([]string) error {
	list := flags.Bool("list", false, "print the kinds")
	return func(arguments []string) error {
		kinds := peers()
		if *list {
			names := []string{}
			for name := range kinds {
				names = append(names, name)
			}
			return told(names)
		}
		kind, found := kinds[arguments[0]]
		if !found {
			return fmt.Errorf("no such peer: %s", arguments[0])
		}
		if err := fill(arguments[1], 3); err != nil {
			return err
		}
		held, err := kind.begin(arguments[1])
		if err != nil {
			return err
		}
		defer held.Close()
		// The daemon has accepted it by then.
		time.Sleep(500 * time.Millisecond)
		if err := told("ready"); err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		return nil
	}
}

type idleResult struct {
	Opened int `json:"opened"`
	Closed int `json:"closed"`
	// Bytes of bodies that were sent.
	Sent int64 `json:"sent"`
	// Seconds until the first and the last connection or call ended.
	First float64 `json:"first_s"`
	Last  float64 `json:"last_s"`
}

// idle opens connections or calls that stop midway, and waits for the daemon to end them.
func idle(flags *flag.FlagSet) func([]string) error {
	count := flags.Int("count", 16, "connections")
	seconds := flags.Duration("seconds", 10*time.Second, "time to wait")
	announce := flags.Int("announce", 0, "bytes that a message announces")
	bytes := flags.Int("bytes", 0, "bytes of it that are sent, in one call after the other of one connection")
	path := flags.String("path", wal+"Append", "method")
	return func(arguments []string) error {
		if arguments[0] == "bodies" {
			return bodies(arguments[1], *path, *count, *announce, *bytes, *seconds)
		}
		var result idleResult
		var mutex sync.Mutex
		var waiting sync.WaitGroup
		began := time.Now()
		for range *count {
			connection, err := idleConnection(arguments[0], arguments[1], *path, *announce)
			if err != nil {
				return err
			}
			defer connection.Close()
			result.Opened++
			waiting.Go(func() {
				_ = connection.SetReadDeadline(began.Add(*seconds))
				if awaitEnd(connection) {
					mutex.Lock()
					defer mutex.Unlock()
					result.Closed++
					result.Last = time.Since(began).Seconds()
					if result.First == 0 {
						result.First = result.Last
					}
				}
			})
		}
		if err := told("ready"); err != nil {
			return err
		}
		waiting.Wait()
		return told(&result)
	}
}

// halves are the messages of a connection each: many large ones, and small ones for the rest of the budget.
var halves = []struct{ size, calls int }{{60_000, 1}, {60_000, 1}, {60_000, 1}, {60_000, 1}, {2_000, 20}, {60, 40}}

// openedHalves counts the connections that send them.
var openedHalves atomic.Uint64

func idleConnection(kind, address, path string, announce int) (net.Conn, error) {
	switch kind {
	case "silent", "half-preface":
		connection, err := connect(address, 0)
		if err == nil && kind == "half-preface" {
			_, err = io.WriteString(connection, http2.ClientPreface[:10])
		}
		return connection, err
	case "preface":
		return open(address, 0)
	case "announce":
		r, err := open(address, 0)
		if err != nil {
			return nil, err
		}
		r.call(path, prefix(announce), false)
		return r, r.flush()
	case "halves":
		// All of each message but its last byte. Small ones find room where large ones do not.
		r, err := open(address, 0)
		if err != nil {
			return nil, err
		}
		one := halves[openedHalves.Add(1)%uint64(len(halves))]
		for range one.calls {
			r.call(path, append(prefix(one.size), make([]byte, one.size-1)...), false)
		}
		return r, r.flush()
	case "heads":
		// A field in the table of the connection, repeated for a byte each.
		r, err := open(address, 0)
		if err != nil {
			return nil, err
		}
		field := []byte{0x40, 1, 'a', 0}
		for range 256 {
			block := append(append(unindexed(path), field...), bytes.Repeat([]byte{0xbe}, 430)...)
			field = nil
			_ = r.out.WriteHeaders(http2.HeadersFrameParam{StreamID: r.next, BlockFragment: block, EndHeaders: true})
			_ = r.out.WriteData(r.next, false, prefix(1<<20))
			r.next += 2
		}
		return r, r.flush()
	case "half-open":
		// Calls whose requests never come.
		r, err := open(address, 0)
		if err != nil {
			return nil, err
		}
		r.stays = true
		for range 256 {
			r.call(path, []byte{}, false)
		}
		return r, r.flush()
	case "reflections":
		r, err := open(address, 0, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		if err != nil {
			return nil, err
		}
		name := "wald.v1.WalService"
		symbol := append([]byte{0x22, byte(len(name))}, name...)
		for range 256 {
			r.call(reflection, append(prefix(len(symbol)), symbol...), false)
		}
		return r, r.flush()
	case "slow-scans":
		r, err := open(address, 0, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		if err != nil {
			return nil, err
		}
		_ = r.out.WriteWindowUpdate(0, 1<<30)
		stream := r.call(wal+"Scan", message(&wald.ScanRequest{Selector: &wald.ScanRequest_Log{Log: "big"}}), true)
		go func() {
			// 80 KB/s.
			for r.out.WriteWindowUpdate(stream, 40_000) == nil && r.flush() == nil {
				time.Sleep(500 * time.Millisecond)
			}
		}()
		return r, nil
	}
	return nil, fmt.Errorf("no such kind: %s", kind)
}

// awaitEnd waits until a connection or its first call ends; false if the deadline comes first. If the peer stays, it
// waits for the end of the connection.
func awaitEnd(connection net.Conn) bool {
	r, framed := connection.(*raw)
	if !framed {
		_, err := io.Copy(io.Discard, connection)
		var late net.Error
		return !(errors.As(err, &late) && late.Timeout())
	}
	for {
		frame, err := r.in.ReadFrame()
		var late net.Error
		switch {
		case errors.As(err, &late) && late.Timeout():
			return false
		case err != nil:
			return true
		}
		switch frame := frame.(type) {
		case *http2.PingFrame:
			if !frame.IsAck() {
				_ = r.out.WritePing(true, frame.Data)
				_ = r.flush()
			}
		case *http2.RSTStreamFrame:
			if !r.stays {
				return true
			}
		case *http2.HeadersFrame:
			if frame.StreamEnded() && !r.stays {
				return true
			}
		case *http2.GoAwayFrame:
			return true
		}
	}
}

// bodies sends messages that never end, in calls of one connection, as far as flow control lets it.
func bodies(address, path string, count, announce, size int, wait time.Duration) error {
	r, err := open(address, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	var result idleResult
	var mutex sync.Mutex
	changed := sync.NewCond(&mutex)
	connection, initial := int64(65535), int64(65535)
	windows, ended, over := map[uint32]int64{}, map[uint32]bool{}, false
	began := time.Now()
	_ = r.SetDeadline(began.Add(wait))
	go func() {
		for {
			frame, err := r.in.ReadFrame()
			mutex.Lock()
			if err != nil {
				over = true
				changed.Broadcast()
				mutex.Unlock()
				return
			}
			end := func(stream uint32) {
				if !ended[stream] {
					ended[stream] = true
					result.Closed++
				}
			}
			switch frame := frame.(type) {
			case *http2.WindowUpdateFrame:
				if frame.StreamID == 0 {
					connection += int64(frame.Increment)
				} else {
					windows[frame.StreamID] += int64(frame.Increment)
				}
			case *http2.SettingsFrame:
				if value, is := frame.Value(http2.SettingInitialWindowSize); is {
					for stream := range windows {
						windows[stream] += int64(value) - initial
					}
					initial = int64(value)
				}
			case *http2.RSTStreamFrame:
				end(frame.StreamID)
			case *http2.HeadersFrame:
				if frame.StreamEnded() {
					end(frame.StreamID)
				}
			case *http2.GoAwayFrame:
				over = true
			}
			changed.Broadcast()
			mutex.Unlock()
		}
	}()
	for range count {
		mutex.Lock()
		stream := r.call(path, prefix(announce), false)
		windows[stream] = initial - 5
		connection -= 5
		result.Opened++
		err := r.flush()
		mutex.Unlock()
		for left := size; left > 0 && err == nil; {
			mutex.Lock()
			for (connection < 1 || windows[stream] < 1) && !ended[stream] && !over {
				changed.Wait()
			}
			part := min(int64(left), 16384, connection, windows[stream])
			if ended[stream] || over {
				mutex.Unlock()
				break
			}
			connection -= part
			windows[stream] -= part
			_ = r.out.WriteData(stream, false, make([]byte, part))
			err = r.flush()
			mutex.Unlock()
			left -= int(part)
			result.Sent += part
		}
	}
	if err := told("ready"); err != nil {
		return err
	}
	mutex.Lock()
	defer mutex.Unlock()
	for result.Closed < result.Opened && !over {
		changed.Wait()
	}
	result.Last = time.Since(began).Seconds()
	return told(&result)
}

type slowResult struct {
	Seconds float64 `json:"seconds"`
	Bytes   int64   `json:"bytes"`
	Pings   int     `json:"pings"`
	Ended   string  `json:"ended"`
}

// slow reads a scan at a steady pace, and answers pings when it reads them.
func slow(flags *flag.FlagSet) func([]string) error {
	rate := flags.Int("rate", 50_000, "bytes a second")
	size := flags.Uint("window", 1<<20, "HTTP/2 window")
	receive := flags.Int("receive", 65536, "receive buffer of the socket")
	records := flags.Int("records", 20, "records of 900 kB to scan")
	scans := flags.Int("scans", 1, "scans that share the connection")
	seconds := flags.Duration("seconds", 15*time.Second, "time of all")
	return func(arguments []string) error {
		if err := fill(arguments[0], *records); err != nil {
			return err
		}
		r, err := open(arguments[0], *receive, http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(*size)})
		if err != nil {
			return err
		}
		defer r.Close()
		paced := &pace{Conn: r.Conn, rate: *rate, began: time.Now()}
		r.in = http2.NewFramer(nil, paced)
		_ = r.out.WriteWindowUpdate(0, uint32(*size))
		for range *scans {
			r.call(wal+"Scan", message(&wald.ScanRequest{Selector: &wald.ScanRequest_Log{Log: "big"}}), true)
		}
		if err := r.flush(); err != nil {
			return err
		}
		_ = r.SetDeadline(time.Now().Add(*seconds))
		var result slowResult
		var taken uint32
		for {
			frame, err := r.in.ReadFrame()
			var late net.Error
			if errors.As(err, &late) && late.Timeout() {
				break
			}
			if err != nil {
				result.Ended = err.Error()
				break
			}
			switch frame := frame.(type) {
			case *http2.PingFrame:
				if !frame.IsAck() {
					result.Pings++
					_ = r.out.WritePing(true, frame.Data)
				}
			case *http2.GoAwayFrame:
				result.Ended = fmt.Sprintf("GOAWAY %v %s", frame.ErrCode, frame.DebugData())
			case *http2.RSTStreamFrame:
				result.Ended = fmt.Sprintf("RST_STREAM %v", frame.ErrCode)
			case *http2.DataFrame:
				if taken += uint32(len(frame.Data())); taken > uint32(*size)/4 {
					_ = r.out.WriteWindowUpdate(0, taken)
					_ = r.out.WriteWindowUpdate(frame.StreamID, taken)
					taken = 0
				}
			}
			if r.pending.Len() > 0 {
				_ = r.flush()
			}
		}
		result.Seconds, result.Bytes = time.Since(paced.began).Seconds(), paced.taken.Load()
		return told(result)
	}
}

// pace reads no faster than a rate.
type pace struct {
	net.Conn
	rate  int
	began time.Time
	taken atomic.Int64
}

func (p *pace) Read(into []byte) (int, error) {
	for {
		allowed := int64(time.Since(p.began).Seconds() * float64(p.rate))
		if left := allowed - p.taken.Load(); left > 0 {
			count, err := p.Conn.Read(into[:min(int64(len(into)), left, 16384)])
			p.taken.Add(int64(count))
			return count, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

type resetsResult struct {
	Sent    int64  `json:"sent"`
	Answers int64  `json:"answers"`
	Ended   string `json:"ended"`
}

// resets sends appends. Unless `keep` is set, it resets each right after it is sent.
func resets(flags *flag.FlagSet) func([]string) error {
	size := flags.Int("bytes", 1_000_000, "bytes of a record")
	connections := flags.Int("connections", 4, "connections")
	keep := flags.Bool("keep", false, "wait for the answers")
	seconds := flags.Duration("seconds", 4*time.Second, "time of all")
	pause := flags.Duration("pause", 2*time.Millisecond, "between the end of an append and its reset")
	return func(arguments []string) error {
		body := appendOf("victim", *size)
		var sent, answers atomic.Int64
		var ended atomic.Value
		var waiting sync.WaitGroup
		until := time.Now().Add(*seconds)
		for range *connections {
			waiting.Go(func() {
				for time.Now().Before(until) {
					if said := resetOnce(arguments[0], body, until, *keep, *pause, &sent, &answers); said != "" {
						ended.CompareAndSwap(nil, said)
					}
				}
			})
		}
		waiting.Wait()
		said, _ := ended.Load().(string)
		return told(resetsResult{sent.Load(), answers.Load(), said})
	}
}

func resetOnce(address string, body []byte, until time.Time, keep bool, pause time.Duration, sent, answers *atomic.Int64) string {
	r, err := open(address, 0)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	_ = r.SetDeadline(until)
	var mutex sync.Mutex
	changed := sync.NewCond(&mutex)
	window, live, over := int64(65535), 0, ""
	go func() {
		for {
			frame, err := r.in.ReadFrame()
			mutex.Lock()
			if err != nil {
				over = err.Error()
			}
			switch frame := frame.(type) {
			case *http2.WindowUpdateFrame:
				if frame.StreamID == 0 {
					window += int64(frame.Increment)
				}
			case *http2.HeadersFrame:
				if frame.StreamEnded() {
					live--
					answers.Add(1)
				}
			case *http2.GoAwayFrame:
				over = fmt.Sprintf("GOAWAY %v %s", frame.ErrCode, frame.DebugData())
			}
			changed.Broadcast()
			stop := over != ""
			mutex.Unlock()
			if stop {
				return
			}
		}
	}()
	for {
		mutex.Lock()
		// A stream's own window counts as large enough: the daemon's is at least a megabyte.
		for over == "" && (window < int64(len(body)) || keep && live >= 16) {
			changed.Wait()
		}
		if over != "" {
			mutex.Unlock()
			if time.Now().After(until) {
				return ""
			}
			return over
		}
		window -= int64(len(body))
		live++
		mutex.Unlock()
		stream := r.call(wal+"Append", body, true)
		if r.flush() != nil {
			return ""
		}
		sent.Add(1)
		if !keep {
			time.Sleep(pause)
			_ = r.out.WriteRSTStream(stream, http2.ErrCodeCancel)
			if r.flush() != nil {
				return ""
			}
		}
	}
}

type handshakesResult struct {
	Done    int     `json:"done"`
	Seconds float64 `json:"seconds"`
	// The first failure.
	Failure string `json:"failure"`
}

// handshakes opens connections at once; each makes a call and stays until the last one is done.
func handshakes(flags *flag.FlagSet) func([]string) error {
	count := flags.Int("count", 2000, "connections")
	return func(arguments []string) error {
		var failed atomic.Value
		var done atomic.Int64
		var group, all sync.WaitGroup
		all.Add(*count)
		began := time.Now()
		for range *count {
			group.Go(func() {
				connection, err := served(arguments[0])
				if err != nil {
					failed.CompareAndSwap(nil, err.Error())
				} else {
					done.Add(1)
					defer connection.Close()
				}
				all.Done()
				all.Wait()
			})
		}
		group.Wait()
		took := time.Since(began)
		failure, _ := failed.Load().(string)
		return told(handshakesResult{int(done.Load()), took.Seconds(), failure})
	}
}

// served opens a connection and waits for the answer to its first call.
func served(address string) (*raw, error) {
	connection, err := open(address, 0)
	if err != nil {
		return nil, err
	}
	connection.call(health+"Check", prefix(0), true)
	if err := connection.flush(); err != nil {
		return nil, err
	}
	for {
		frame, err := connection.in.ReadFrame()
		if err != nil {
			return nil, err
		}
		if _, answered := frame.(*http2.HeadersFrame); answered {
			return connection, nil
		}
	}
}
