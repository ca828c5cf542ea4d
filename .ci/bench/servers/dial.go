package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/gomodule/redigo/redis"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	client "wald.dev/client/go"
	wald "wald.dev/client/go/waldv1"
)

type waldCaller struct {
	service    wald.WalServiceClient
	durability wald.Durability
}

func durabilityOf(level string) wald.Durability {
	return map[string]wald.Durability{
		"durable":    wald.Durability_DURABILITY_DURABLE,
		"written":    wald.Durability_DURABILITY_WRITTEN,
		"replicated": wald.Durability_DURABILITY_REPLICATED,
	}[level]
}

// One log, by the generated stubs: no client code repeats a call or gathers several.
func dialWald(_ context.Context, address string, wanted load) ([]appender, func(), error) {
	durability := durabilityOf(wanted.level)
	connections := make([]*grpc.ClientConn, wanted.connections)
	for i := range connections {
		connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, nil, err
		}
		connections[i] = connection
	}
	callers := spread(connections, wanted.inFlight, func(connection *grpc.ClientConn, _ int) appender {
		return &waldCaller{wald.NewWalServiceClient(connection), durability}
	})
	return callers, func() {
		for _, connection := range connections {
			_ = connection.Close()
		}
	}, nil
}

func (c *waldCaller) append(ctx context.Context, record []byte) error {
	_, err := c.service.Append(ctx, &wald.AppendRequest{
		Log:        "bench",
		Record:     &wald.Record{Payload: &wald.Record_Data{Data: record}},
		Durability: c.durability,
	})
	return err
}

type sessionCaller struct {
	session    *client.Session
	durability wald.Durability
}

// One log, by the client for Go: a session for each connection, which its callers share.
func dialWaldSession(ctx context.Context, address string, wanted load) ([]appender, func(), error) {
	clients := make([]*client.Client, wanted.connections)
	sessions := make([]*client.Session, wanted.connections)
	for i := range sessions {
		connected, err := client.Dial(address)
		if err != nil {
			return nil, nil, err
		}
		clients[i] = connected
		if sessions[i], err = connected.Session(ctx); err != nil {
			return nil, nil, err
		}
	}
	durability := durabilityOf(wanted.level)
	callers := spread(sessions, wanted.inFlight, func(session *client.Session, _ int) appender {
		return &sessionCaller{session, durability}
	})
	return callers, func() {
		for i, connected := range clients {
			sessions[i].Close()
			_ = connected.Close()
		}
	}, nil
}

func (c *sessionCaller) append(ctx context.Context, record []byte) error {
	pending, err := c.session.Send(ctx, client.Batch{
		Logs:       []client.LogBatch{{Log: "bench", Records: []client.Record{{Data: record}}}},
		Durability: c.durability,
	})
	if err != nil {
		return err
	}
	_, err = pending.Wait(ctx)
	return err
}

type redisCaller struct{ connection redis.Conn }

// A stream; one connection for each caller, as one carries one call at a time.
func dialRedis(_ context.Context, address string, wanted load) ([]appender, func(), error) {
	connections := make([]redis.Conn, wanted.inFlight)
	for i := range connections {
		connection, err := redis.Dial("tcp", address)
		if err != nil {
			return nil, nil, err
		}
		connections[i] = connection
	}
	callers := spread(connections, wanted.inFlight, func(connection redis.Conn, _ int) appender {
		return &redisCaller{connection}
	})
	return callers, func() {
		for _, connection := range connections {
			_ = connection.Close()
		}
	}, nil
}

func (c *redisCaller) append(_ context.Context, record []byte) error {
	_, err := c.connection.Do("XADD", "bench", "*", "d", record)
	return err
}

type postgresCaller struct{ connection *pgx.Conn }

// A table with an ascending number; one connection and one prepared statement for each caller.
func dialPostgres(ctx context.Context, address string, wanted load) ([]appender, func(), error) {
	connections := make([]*pgx.Conn, wanted.inFlight)
	for i := range connections {
		connection, err := pgx.Connect(ctx, address)
		if err != nil {
			return nil, nil, err
		}
		connections[i] = connection
		if i == 0 {
			const table = "CREATE TABLE IF NOT EXISTS bench (lsn bigserial PRIMARY KEY, data bytea NOT NULL)"
			if _, err := connection.Exec(ctx, table); err != nil {
				return nil, nil, err
			}
		}
		if _, err := connection.Prepare(ctx, "append", "INSERT INTO bench (data) VALUES ($1)"); err != nil {
			return nil, nil, err
		}
	}
	callers := spread(connections, wanted.inFlight, func(connection *pgx.Conn, _ int) appender {
		return &postgresCaller{connection}
	})
	return callers, func() {
		for _, connection := range connections {
			_ = connection.Close(ctx)
		}
	}, nil
}

func (c *postgresCaller) append(ctx context.Context, record []byte) error {
	_, err := c.connection.Exec(ctx, "append", record)
	return err
}

type natsCaller struct{ stream jetstream.JetStream }

// A JetStream stream in files.
func dialNATS(ctx context.Context, address string, wanted load) ([]appender, func(), error) {
	connections := make([]*nats.Conn, wanted.connections)
	streams := make([]jetstream.JetStream, wanted.connections)
	for i := range connections {
		connection, err := nats.Connect(address)
		if err != nil {
			return nil, nil, err
		}
		connections[i] = connection
		if streams[i], err = jetstream.New(connection); err != nil {
			return nil, nil, err
		}
	}
	config := jetstream.StreamConfig{Name: "bench", Subjects: []string{"bench"}, Storage: jetstream.FileStorage}
	if _, err := streams[0].CreateOrUpdateStream(ctx, config); err != nil {
		return nil, nil, err
	}
	callers := spread(streams, wanted.inFlight, func(stream jetstream.JetStream, _ int) appender {
		return &natsCaller{stream}
	})
	return callers, func() {
		for _, connection := range connections {
			connection.Close()
		}
	}, nil
}

func (c *natsCaller) append(ctx context.Context, record []byte) error {
	_, err := c.stream.Publish(ctx, "bench", record)
	return err
}

type etcdCaller struct {
	client *clientv3.Client
	prefix string
	number int
}

// A key for each record.
func dialEtcd(ctx context.Context, address string, wanted load) ([]appender, func(), error) {
	clients := make([]*clientv3.Client, wanted.connections)
	for i := range clients {
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{address}, Context: ctx})
		if err != nil {
			return nil, nil, err
		}
		clients[i] = client
	}
	callers := spread(clients, wanted.inFlight, func(client *clientv3.Client, caller int) appender {
		return &etcdCaller{client: client, prefix: fmt.Sprintf("bench/%d/", caller)}
	})
	return callers, func() {
		for _, client := range clients {
			_ = client.Close()
		}
	}, nil
}

func (c *etcdCaller) append(ctx context.Context, record []byte) error {
	c.number++
	_, err := c.client.Put(ctx, c.prefix+strconv.Itoa(c.number), string(record))
	return err
}

type s2Caller struct {
	client *http.Client
	url    string
}

// A stream of a basin, by the JSON of its REST interface.
func dialS2(ctx context.Context, address string, wanted load) ([]appender, func(), error) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: wanted.inFlight}}
	caller := &s2Caller{client, address + "/v1/streams/bench/records"}
	put := func(path, body string) error {
		return caller.call(ctx, http.MethodPut, address+path, []byte(body), true)
	}
	if err := put("/v1/basins/bench-basin", "{}"); err != nil {
		return nil, nil, err
	}
	if err := put("/v1/streams/bench", "{}"); err != nil {
		return nil, nil, err
	}
	callers := spread([]*s2Caller{caller}, wanted.inFlight, func(caller *s2Caller, _ int) appender { return caller })
	return callers, client.CloseIdleConnections, nil
}

func (c *s2Caller) append(ctx context.Context, record []byte) error {
	body, err := json.Marshal(map[string]any{"records": []map[string]string{{"body": string(record)}}})
	if err != nil {
		return err
	}
	return c.call(ctx, http.MethodPost, c.url, body, false)
}

func (c *s2Caller) call(ctx context.Context, method, url string, body []byte, thereIsFine bool) error {
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer bench")
	request.Header.Set("S2-Basin", "bench-basin")
	answer, err := c.client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode/100 == 2 || thereIsFine && answer.StatusCode == http.StatusConflict {
		return nil
	}
	return fmt.Errorf("%s %s: %s: %s", method, url, answer.Status, said)
}
