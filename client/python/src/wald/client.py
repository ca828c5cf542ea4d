"""The connection, and the one place where unary calls are repeated."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

import grpc
import grpc.aio
from google.protobuf import field_mask_pb2

from wald.appends import Appends
from wald.durable_follower import DurableFollower
from wald.durable_producer import DurableProducer
from wald.errors import (
    BadCredential,
    CredentialExpired,
    NotSent,
    Outcome,
    TlsError,
    TokenError,
    WaldError,
    connection_lost,
    from_status,
)
from wald.nodes import DEFAULT_ENDPOINT, Connection, Nodes, endpoints, owner_at, owner_of
from wald.producer import Producer
from wald.records import (
    Ack,
    BatchAck,
    Check,
    Condition,
    Cursor,
    CursorCommit,
    Durability,
    Fence,
    LogBatch,
    Page,
    Record,
    Tail,
    Visibility,
    batch_ack,
    batch_request,
    cursor_from_proto,
    optional,
    record_to_proto,
    records_from_proto,
)
from wald.retry import Repeat, RetryPolicy
from wald.scan import Scan
from wald.session import Session
from wald.state import StateOrPath
from wald.times import Seconds, start_us, to_duration, to_seconds
from wald.tls import Credentials, TlsFiles, problem_of
from wald.tokens import CarryingChannel, TokenSource, bad_token, is_loopback
from wald.v1 import (
    cursor_pb2,
    cursor_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
    ops_pb2_grpc,
    types_pb2,
    wal_pb2,
    wal_pb2_grpc,
)

# Answers stay below 1 MiB unless one record alone is larger; the server's limit on records
# can be raised, so leave room.
_MAX_ANSWER_BYTES = 64 << 20


class Client:
    """A client of one Wald server, or of several that share a store: one connection to each server that it calls,
    made with the first call and again when it breaks.

    **The client repeats automatically**, within `retry` and the deadline of the call: reads,
    after any passing failure; appends, when the server or the transport reports that nothing
    was applied; appends with an expected lsn or a producer, also when the connection broke
    underway, because they cannot be applied twice. A plain append whose connection broke is
    *not* repeated: it raises with `outcome` UNKNOWN.

    `endpoint` can name several servers with commas (`a:6925,b:6925`, `https://a,https://b`). The client calls one
    at a time, first the first. A server that does not own the store names the owner (reason MOVED): the client
    repeats the call there at once, and goes on there. It also goes there once it has a connection, if a server answers
    for the owner. If a server cannot be reached, starts, stops, or knows no
    owner, the next attempt goes to the next server of the list, in a ring.

    Spans are in seconds, or timedeltas. `timeout` is the deadline of calls that name none, over all their
    attempts; scans, sessions and producers have none of it. The connection is pinged every
    `keepalive` seconds, also when idle, and given up if no answer comes within
    `keepalive_timeout`. A scan that is silent for `silence_timeout` counts as lost; the server
    sends a heartbeat after 15 s.

    An endpoint that begins with `https://` gets TLS. `tls_ca` is the file with the CAs to trust instead
    of the system's, in PEM; `tls_cert` and `tls_key` are the files of the client's certificate and its key;
    `server_name` is the name that the server's certificate must have, instead of the endpoint's host. The
    files are read now, and again after a connection has failed.

    `token`, or the content of `token_file` without white space around it, goes with every call. The file
    is read again at most once a second, and once when the server refuses the token; the call is repeated
    if the file has another token then. Without TLS a token goes only to loopback, unless
    `allow_insecure_token` is set.

    `metadata` (pairs) goes with every call. `interceptors` are grpc.aio's. `channel` is a channel of the
    caller's own, which the caller closes; the endpoint and the settings of connections and TLS do not count
    then. The client never leaves it for another server.

    `append` and `append_batch` share one stream to each server, which is cheaper than a call for each. With
    `share_appends=False` each of them is a call of its own, as behind proxies without streams, or for
    instrumentation that counts calls. This also holds with `metadata`, `interceptors` or `channel`.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        server_name: str | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        allow_insecure_token: bool = False,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
        channel: grpc.aio.Channel | None = None,
        timeout: Seconds = 10.0,
        connect_timeout: Seconds = 5.0,
        keepalive: Seconds = 10.0,
        keepalive_timeout: Seconds = 5.0,
        silence_timeout: Seconds = 60.0,
        retry: RetryPolicy = RetryPolicy(),
        share_appends: bool = True,
    ):
        listed, secure = endpoints(endpoint)
        self._nodes = Nodes(listed, self._connect)
        self.timeout = to_seconds(timeout)
        self.silence_timeout = to_seconds(silence_timeout)
        self._connect_timeout = to_seconds(connect_timeout)
        self.retry = retry
        self._options = [
            # One's own connection, whatever other clients of this process do to theirs.
            ("grpc.use_local_subchannel_pool", 1),
            # Nobody's service configuration may make the transport repeat appends.
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
            ("grpc.max_send_message_length", -1),
            # The time to make a connection, whatever its name.
            ("grpc.min_reconnect_backoff_ms", _milliseconds(connect_timeout)),
            ("grpc.initial_reconnect_backoff_ms", _milliseconds(retry.first_pause)),
            ("grpc.max_reconnect_backoff_ms", _milliseconds(retry.max_pause)),
            ("grpc.keepalive_time_ms", _milliseconds(keepalive)),
            ("grpc.keepalive_timeout_ms", _milliseconds(keepalive_timeout)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        self._files = _tls_files(tls_ca, tls_cert, tls_key, server_name, secure, channel is not None)
        if self._files is not None and server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", server_name))
        self._credentials = None if self._files is None else Credentials(self._files)
        self._token: TokenSource | None = None
        # A token of this client would cross plaintext, so it must stay on this machine.
        self._keeps_token_here = False
        if token is not None or token_file is not None:
            self._token = TokenSource(token, None if token_file is None else os.fspath(token_file))
            self._keeps_token_here = self._files is None and not allow_insecure_token
        self._own: grpc.aio.Channel | None = channel
        if self._keeps_token_here:
            if channel is not None:
                raise bad_token("whether one's own channel is encrypted is not known: set allow_insecure_token if it is")
            for target in listed:
                self._refuse_plaintext(target)
            # gRPC would pass connections to loopback through the proxy of the environment, too.
            self._options.append(("grpc.enable_http_proxy", 0))
        self._metadata = tuple(metadata)
        self._interceptors = list(interceptors)
        # These must see each call.
        sees_calls = self._metadata or self._interceptors or channel is not None
        self._appends = Appends(self) if share_appends and not sees_calls else None
        self._tls_failure: TlsError | None = None
        self._closed = False

    @classmethod
    def from_env(cls, **settings) -> Client:
        """A client of the servers that the environment names. An empty variable counts as absent, and
        `settings` come before the environment.

        `WALD_ENDPOINT` (default: `DEFAULT_ENDPOINT`), `WALD_TLS_CA`, `WALD_TLS_CERT`, `WALD_TLS_KEY`,
        `WALD_TLS_SERVER_NAME`, and `WALD_TOKEN_FILE` or else `WALD_TOKEN`.
        """
        return cls(**settings_of_env(settings))

    def _refuse_plaintext(self, target: str) -> None:
        """A token must not cross plaintext to another machine."""
        if self._keeps_token_here and not is_loopback(target):
            raise bad_token(f"a token must not cross plaintext to {target}: use https://, or allow_insecure_token")

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self, grace: Seconds | None = 10.0) -> None:
        """Ends the connections. Calls underway have `grace` seconds to end; scans and sessions should
        have been closed before."""
        self._closed = True
        seconds = None if grace is None else to_seconds(grace)
        if self._appends is not None:
            seconds = await self._appends.close(seconds)
        if self._own is None:
            await self._nodes.close(seconds)
        if self._appends is not None:
            await self._appends.end()

    @property
    def closed(self) -> bool:
        return self._closed

    # Appending.

    async def append(
        self,
        log: str,
        record: Record | bytes | str,
        *,
        expected_lsn: int | None = None,
        condition: Condition | None = None,
        durability: Durability | None = None,
        timeout: Seconds | None = None,
    ) -> Ack:
        """Appends one record to a log.

        With `expected_lsn` (short for a condition of its own) the record gets that lsn or the
        append fails with PositionMismatch; it is then safe to repeat, which the client does.
        `durability`: how durable before the answer; unset, as the log's sync mode says.
        """
        if expected_lsn is not None:
            if condition is not None:
                raise ValueError("expected_lsn belongs into the condition, if there is one")
            condition = Condition(expected_lsn=expected_lsn)
        condition = condition or Condition()
        answer = await self._call(
            "wal.Append",
            wal_pb2.AppendRequest(
                log=log, record=record_to_proto(record), condition=condition.to_proto(), durability=durability
            ),
            Repeat.GUARDED if condition.guards else Repeat.HARMFUL,
            timeout,
            self._appends,
        )
        return Ack(
            lsn=answer.lsn,
            timestamp_us=answer.timestamp_us,
            durable_lsn=optional(answer, "durable_lsn"),
            replicated_lsn=optional(answer, "replicated_lsn"),
            durability=Durability(answer.durability),
            deduplicated=answer.deduplicated,
            position=optional(answer, "position"),
            recovery_epoch=answer.recovery_epoch,
            log_id=answer.log_id,
        )

    async def append_batch(
        self,
        batches: Iterable[LogBatch],
        *,
        checks: Iterable[Check] = (),
        cursors: Iterable[CursorCommit] = (),
        durability: Durability | None = None,
        timeout: Seconds | None = None,
    ) -> BatchAck:
        """Appends to one or more logs and moves cursors, all or nothing."""
        batches, cursors = list(batches), list(cursors)
        guarded = any(batch.guards for batch in batches) or any(cursor.guards for cursor in cursors)
        answer = await self._call(
            "wal.AppendBatch",
            batch_request(batches, checks, cursors, durability),
            Repeat.GUARDED if guarded else Repeat.HARMFUL,
            timeout,
            self._appends,
        )
        return batch_ack(answer)

    def session(self, *, window_bytes: int = 8 << 20) -> Session:
        """Pipelined batches on one stream, acked in order. Must be called within the event loop."""
        return Session(self, window_bytes)

    def producer(
        self,
        log: str,
        *,
        id: str | None = None,
        epoch: int | None = None,
        sequence: int = 0,
        log_id: int | None = None,
        writer_epoch: int | None = None,
        durability: Durability | None = None,
        retry_for: Seconds = 60.0,
        linger: Seconds = 0.0,
        batch_records: int = 1000,
        batch_bytes: int = 1 << 20,
        window_batches: int = 512,
        window_bytes: int = 8 << 20,
    ) -> Producer:
        """A source of appends to one log whose retries are exactly-once. Opened by `async with`.

        Without `id`, a random one: exactly-once as long as this producer lives; closing it
        makes the server forget the id. Its `epoch` is the lowest that the log takes,
        otherwise the default is 0. `durable_producer` keeps a producer over restarts of the
        program. To do that in one's own way, store the id: give the same epoch, the next `sequence` and the log's number, and the server recognises
        batches that were appended already. A higher `epoch` refuses the batches that an
        earlier incarnation still has underway; it counts from 0 again and recognises none of
        the older ones. `log_id`: the log must have this number; default: its number when the
        producer is opened. `writer_epoch`: for batches that name no other.

        It retries until nothing was acked for `retry_for` seconds. A session that brings no ack for half of
        them is given up, and its batches are sent again on another one. `linger`: maximum seconds
        that a record waits for others to make a batch of up to `batch_records` and
        `batch_bytes`; 0: sends the gathered records when there is room. At most
        `window_batches` and `window_bytes` are unacked; beyond that, handing over waits.
        `window_batches` is at most 1,024: the server recognises no more batches when they are
        sent again, unless it is configured otherwise.
        """
        return Producer(
            self,
            log,
            id=id,
            epoch=epoch,
            sequence=sequence,
            log_id=log_id,
            writer_epoch=writer_epoch,
            durability=durability,
            retry_for=to_seconds(retry_for),
            linger=to_seconds(linger),
            batch_records=batch_records,
            batch_bytes=batch_bytes,
            window_batches=window_batches,
            window_bytes=window_bytes,
        )

    def durable_producer(
        self,
        log: str,
        state: StateOrPath,
        *,
        writer_epoch: int | None = None,
        durability: Durability | None = None,
        retry_for: Seconds = 60.0,
        window_bytes: int = 8 << 20,
    ) -> DurableProducer:
        """A producer that goes on after a restart of the program: exactly-once over restarts of both sides. Opened by
        `async with`.

        `state` is a State, or the path of a file (FileState). If a state is there, the producer of that state goes on,
        and batches whose acks it had not seen are sent again. Otherwise a producer with a random id begins. `producer`
        describes the other settings. At most 64 batches are kept and not acked.

        With a durability below DURABLE, a crash of the server can lose acked batches, and the producer is then refused
        (ProducerGap). The server forgets a producer that is idle for longer than its setting `producer_max_idle`. If a
        batch of the state is in doubt then, every start is refused; see DurableProducer.

        ```python
        async with client.durable_producer("orders", "orders.state") as producer:
            for number in range(producer.next_sequence, 1000):
                await producer.append_batch([f"order {number}"])
        ```
        """
        return DurableProducer(
            self,
            log,
            state,
            writer_epoch=writer_epoch,
            durability=durability,
            retry_for=to_seconds(retry_for),
            window_bytes=window_bytes,
        )

    # Reading.

    async def read(
        self,
        log: str,
        *,
        lsn: int | None = None,
        timestamp_us: int | None = None,
        time: datetime | None = None,
        tail_offset: int | None = None,
        max_records: int = 0,
        max_bytes: int = 0,
        wait: Seconds = 0.0,
        visibility: Visibility | None = None,
        any_node: bool = False,
        log_id: int | None = None,
        timeout: Seconds | None = None,
    ) -> Page:
        """Reads a page of one log, from `lsn`, from a time (`time`, a datetime with a time zone, or exactly
        `timestamp_us`), or the last `tail_offset` records; by default from the first record kept. `wait`: maximum seconds to wait for a
        first record. `any_node`: any node of the store may answer from its copy, which is usually a
        second old, and at most twice its `lease_ttl`; implies REPLICATED."""
        one_start(lsn=lsn, timestamp_us=timestamp_us, time=time, tail_offset=tail_offset)
        wait_seconds = to_seconds(wait)
        answer = await self._call(
            "wal.Read",
            wal_pb2.ReadRequest(
                log=log,
                lsn=lsn,
                timestamp_us=start_us(timestamp_us, time),
                tail_offset=tail_offset,
                max_records=max_records,
                max_bytes=max_bytes,
                wait=to_duration(wait_seconds) if wait_seconds else None,
                visibility=visibility,
                any_node=any_node,
                log_id=log_id,
            ),
            Repeat.READ,
            self.timeout + wait_seconds if timeout is None else timeout,
        )
        return Page(
            records=records_from_proto(answer.batch),
            next_lsn=answer.next_lsn,
            tail_lsn=answer.tail_lsn,
            durable_lsn=answer.durable_lsn,
            replicated_lsn=optional(answer, "replicated_lsn"),
            first_lsn=answer.first_lsn,
            recovery_epoch=answer.recovery_epoch,
        )

    def scan(
        self,
        log: str | None = None,
        *,
        prefix: str | None = None,
        all: bool = False,
        lsn: int | None = None,
        timestamp_us: int | None = None,
        time: datetime | None = None,
        tail_offset: int | None = None,
        cursor: bytes | None = None,
        until_lsn: int | None = None,
        max_records: int = 0,
        visibility: Visibility | None = None,
        any_node: bool = False,
        log_id: int | None = None,
        follow: bool = False,
    ) -> Scan:
        """A range of one log, of all logs with a prefix, or of everything, up to the tail of the moment:
        an async iterator of `ScanEvent`. `time` and `any_node`: as in `read`. With `any_node` and `tail_offset` a follower begins
        at the tail of the copy, and fails if the connection is lost before the first event."""
        if (log is not None) + (prefix is not None) + all != 1:
            raise ValueError("exactly one of log, prefix and all says what to scan")
        one_start(lsn=lsn, timestamp_us=timestamp_us, time=time, tail_offset=tail_offset, cursor=cursor)
        request = wal_pb2.ScanRequest(
            log=log,
            prefix=prefix,
            all=wal_pb2.AllLogs() if all else None,
            lsn=lsn,
            timestamp_us=start_us(timestamp_us, time),
            tail_offset=tail_offset,
            cursor=cursor,
            until_lsn=until_lsn,
            max_records=max_records,
            follow=follow,
            visibility=visibility,
            any_node=any_node,
            log_id=log_id,
        )
        return Scan(self, request)

    def follow(self, log: str | None = None, **arguments) -> Scan:
        """Scans, and continues with records that are appended later, over lost connections
        and restarts of the server, without end, and without repeating or skipping anything.
        `durable_follower` does so over restarts of the program, too."""
        return self.scan(log, follow=True, **arguments)

    def durable_follower(self, log: str | None = None, *, state: StateOrPath, **arguments) -> DurableFollower:
        """Follows as `follow` does, with its arguments, and over restarts of the program, too: keeps the effects of
        records together with the cursor behind them. Opened by `async with`.

        `state` is a State, or the path of a file (FileState). If a state has a cursor, it goes on there, wherever the
        arguments begin. A start at the tail holds only from the first `keep` on.

        ```python
        async with client.durable_follower("orders", state="count.state") as follower:
            count = int(follower.effects or b"0")
            async for batches in follower:
                count += sum(len(batch.records) for batch in batches)
                await follower.keep(str(count))
        ```
        """
        return DurableFollower(self.follow(log, **arguments), state)

    async def tail(
        self,
        log: str,
        *,
        visibility: Visibility | None = None,
        recovery_epoch: int | None = None,
        log_id: int | None = None,
        timeout: Seconds | None = None,
    ) -> Tail:
        """Returns the tail of a log; with the `recovery_epoch` of an earlier ack, also the
        end of that epoch's survivors."""
        answer = await self._call(
            "wal.GetTail",
            wal_pb2.GetTailRequest(
                log=log, visibility=visibility, recovery_epoch=recovery_epoch, log_id=log_id
            ),
            Repeat.READ,
            timeout,
        )
        return Tail(
            first_lsn=answer.first_lsn,
            tail_lsn=answer.tail_lsn,
            durable_lsn=answer.durable_lsn,
            replicated_lsn=optional(answer, "replicated_lsn"),
            writer_epoch=answer.writer_epoch,
            recovery_epoch=answer.recovery_epoch,
            log_id=answer.log_id,
            survived_position=optional(answer, "survived_position"),
        )

    # Operations on a log.

    async def fence(
        self,
        log: str,
        writer_epoch: int | None = None,
        *,
        log_id: int | None = None,
        timeout: Seconds | None = None,
    ) -> Fence:
        """Raises a log's writer epoch, by one unless given. Appends with an older epoch, or
        with none, then raise Fenced."""
        if writer_epoch is not None:
            # The second time it no longer exceeds the current one.
            repeat = Repeat.GUARDED
        elif log_id is not None:
            # A repeat raises the epoch twice; the caller still holds the newest.
            repeat = Repeat.HARMLESS
        else:
            # But it could shut out the writer of a log that was created later under the name.
            repeat = Repeat.HARMFUL
        answer = await self._call(
            "wal.Fence",
            wal_pb2.FenceRequest(log=log, writer_epoch=writer_epoch, log_id=log_id),
            repeat,
            timeout,
        )
        return Fence(tail_lsn=answer.tail_lsn, writer_epoch=answer.writer_epoch, log_id=answer.log_id)

    async def trim(
        self, log: str, before_lsn: int, *, log_id: int | None = None, timeout: Seconds | None = None
    ) -> int:
        """Forgets the records below `before_lsn`; returns the first lsn kept."""
        answer = await self._call(
            "wal.Trim",
            wal_pb2.TrimRequest(log=log, before_lsn=before_lsn, log_id=log_id),
            # Twice is as once, except to another log that got the name in between.
            Repeat.HARMFUL if log_id is None else Repeat.HARMLESS,
            timeout,
        )
        return answer.first_lsn

    async def sync(self, log: str = "", *, device: bool = True, timeout: Seconds | None = None) -> None:
        """A barrier: everything accepted before it is flushed to the device, or only handed to the
        operating system. Without `log`, in all logs."""
        target = types_pb2.SYNC_TARGET_DEVICE if device else types_pb2.SYNC_TARGET_OS
        await self._call(
            "wal.Sync", wal_pb2.SyncRequest(log=log, target=target), Repeat.HARMLESS, timeout
        )

    # Administration, in the contract's own messages.

    async def create_log(
        self, log: str, config: log_pb2.LogConfig | None = None, *, timeout: Seconds | None = None
    ) -> log_pb2.Log:
        """Makes a log; LogExists if there is one."""
        request = log_pb2.CreateLogRequest(log=log, config=config)
        return (await self._call("logs.CreateLog", request, Repeat.HARMFUL, timeout)).log

    async def get_log(self, log: str, *, timeout: Seconds | None = None) -> log_pb2.Log:
        """A log: its configuration and where it stands."""
        request = log_pb2.GetLogRequest(log=log)
        return (await self._call("logs.GetLog", request, Repeat.READ, timeout)).log

    async def list_logs(
        self, prefix: str = "", *, page_size: int = 0, timeout: Seconds | None = None
    ) -> AsyncIterator[log_pb2.Log]:
        """The logs whose names start with `prefix`, by name; asks for page after page."""
        request = log_pb2.ListLogsRequest(prefix=prefix, page_size=page_size)
        while True:
            answer = await self._call("logs.ListLogs", request, Repeat.READ, timeout)
            for log in answer.logs:
                yield log
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def update_log(
        self,
        log: str,
        config: log_pb2.LogConfig,
        paths: Iterable[str] = (),
        *,
        timeout: Seconds | None = None,
    ) -> log_pb2.Log:
        """Changes the configuration of a log: the fields that `paths` name, such as `sync_mode` or
        `retention.max_age`; none: all that are set in `config`."""
        mask = field_mask_pb2.FieldMask(paths=paths)
        request = log_pb2.UpdateLogRequest(log=log, config=config, update_mask=mask)
        return (await self._call("logs.UpdateLog", request, Repeat.HARMLESS, timeout)).log

    async def list_producers(
        self, log: str, *, log_id: int | None = None, page_size: int = 0, timeout: Seconds | None = None
    ) -> AsyncIterator[log_pb2.LogProducer]:
        """The producers of a log, by id; asks for page after page."""
        request = log_pb2.ListProducersRequest(log=log, log_id=log_id, page_size=page_size)
        while True:
            answer = await self._call("logs.ListProducers", request, Repeat.READ, timeout)
            for producer in answer.producers:
                yield producer
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def forget_producer(
        self, log: str, producer_id: str, *, log_id: int | None = None, timeout: Seconds | None = None
    ) -> None:
        """Forgets a producer, which makes room for another one. Its epoch is over: later batches of this
        epoch are ProducerExpired, and are never appended twice."""
        request = log_pb2.ForgetProducerRequest(log=log, producer_id=producer_id, log_id=log_id)
        await self._call("logs.ForgetProducer", request, Repeat.HARMFUL, timeout)

    async def delete_log(
        self, log: str, *, log_id: int | None = None, timeout: Seconds | None = None
    ) -> None:
        """Forgets a log with all its records, cursors and producers."""
        request = log_pb2.DeleteLogRequest(log=log, log_id=log_id)
        await self._call("logs.DeleteLog", request, Repeat.HARMFUL, timeout)

    async def shred_log(
        self, log: str, *, log_id: int | None = None, timeout: Seconds | None = None
    ) -> None:
        """Deletes a log and destroys its key, so that no copy of its records can be read: in backups, archives and
        snapshots, too. The server needs encryption with a key for each log; without one, it answers NO_OWN_KEY and
        deletes nothing."""
        request = log_pb2.DeleteLogRequest(log=log, log_id=log_id, shred=True)
        await self._call("logs.DeleteLog", request, Repeat.HARMFUL, timeout)

    # Cursors: named positions of consumers.

    async def commit_cursor(
        self,
        log: str,
        cursor: str,
        lsn: int,
        *,
        expected_lsn: int | None = None,
        log_id: int | None = None,
        timeout: Seconds | None = None,
    ) -> Cursor:
        """Moves a cursor to the next lsn to read, or makes it. With `expected_lsn` only if it stands
        there now; 0 also matches one that does not exist yet."""
        commit = CursorCommit(log, cursor, lsn, expected_lsn, log_id)
        answer = await self._call(
            "cursors.CommitCursor",
            cursor_pb2.CommitCursorRequest(commit=commit.to_proto()),
            # A late repeat would undo another client's commit in between.
            Repeat.GUARDED if commit.guards else Repeat.HARMFUL,
            timeout,
        )
        return cursor_from_proto(answer.cursor)

    async def get_cursor(
        self, log: str, cursor: str, *, log_id: int | None = None, timeout: Seconds | None = None
    ) -> Cursor:
        """Returns the position of a cursor."""
        request = cursor_pb2.GetCursorRequest(log=log, cursor=cursor, log_id=log_id)
        answer = await self._call("cursors.GetCursor", request, Repeat.READ, timeout)
        return cursor_from_proto(answer.cursor)

    async def list_cursors(
        self, log: str, *, log_id: int | None = None, page_size: int = 0, timeout: Seconds | None = None
    ) -> AsyncIterator[Cursor]:
        """The cursors of a log, by name; asks for page after page."""
        request = cursor_pb2.ListCursorsRequest(log=log, log_id=log_id, page_size=page_size)
        while True:
            answer = await self._call("cursors.ListCursors", request, Repeat.READ, timeout)
            for cursor in answer.cursors:
                yield cursor_from_proto(cursor)
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def delete_cursor(
        self, log: str, cursor: str, *, log_id: int | None = None, timeout: Seconds | None = None
    ) -> None:
        """Forgets a cursor."""
        request = cursor_pb2.DeleteCursorRequest(log=log, cursor=cursor, log_id=log_id)
        await self._call("cursors.DeleteCursor", request, Repeat.HARMFUL, timeout)

    # The connection.

    @property
    def endpoint(self) -> str:
        """The current server, as `HOST:PORT`: the one that the next call asks."""
        return self._nodes.current

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection to the current server, for generated stubs (`wald.v1`) that this package does not wrap.
        Nothing is repeated there, and no other server is called. Use it within the event loop only."""
        return self._open().channel

    def _open(self) -> Connection:
        """The connection to the current server."""
        if self._closed:
            raise RuntimeError("the client is closed")
        return self._nodes.open()

    def _connect(self, endpoint: str) -> grpc.aio.Channel:
        inner = self._own
        if inner is None and self._files is None:
            inner = grpc.aio.insecure_channel(endpoint, self._options, interceptors=self._interceptors)
        elif inner is None and self._credentials is not None:
            inner = grpc.aio.secure_channel(
                endpoint,
                self._credentials.of_channel(),
                self._options,
                interceptors=self._interceptors,
            )
        if self._token is None and not self._metadata:
            return inner
        return CarryingChannel(inner, self._token, self._metadata)

    @property
    def tls_failure(self) -> TlsError | None:
        """The last failure of TLS, unless a call has been answered since. Calls repeat such failures silently
        within their deadline."""
        return self._tls_failure

    @property
    def wal(self) -> wal_pb2_grpc.WalServiceStub:
        """The generated stub of WalService at the current server. Nothing is repeated there."""
        return self._open().stub(wal_pb2_grpc.WalServiceStub)

    @property
    def logs(self) -> log_pb2_grpc.LogServiceStub:
        """The generated stub of LogService at the current server."""
        return self._open().stub(log_pb2_grpc.LogServiceStub)

    @property
    def cursors(self) -> cursor_pb2_grpc.CursorServiceStub:
        """The generated stub of CursorService at the current server."""
        return self._open().stub(cursor_pb2_grpc.CursorServiceStub)

    @property
    def ops(self) -> ops_pb2_grpc.OpsServiceStub:
        """The generated stub of OpsService at the current server."""
        return self._open().stub(ops_pb2_grpc.OpsServiceStub)

    def _error(self, code: grpc.StatusCode, message: str, metadata, connection: Connection) -> WaldError:
        """Reads a status of a call on a connection, and chooses the server of the next one."""
        error = from_status(code, message, metadata)
        if self._own is not None:
            return error
        if isinstance(error, NotSent):
            error = self._not_connected(error, connection)
        asked = connection.endpoint
        owner = None
        try:
            owner = owner_of(error)
            if owner is not None:
                self._refuse_plaintext(owner)
        except (ValueError, TokenError) as refused:
            owner = None
            error.message += f"; the client does not call that owner: {refused}"
        self._nodes.failed(asked, error, owner)
        if self._nodes.several:
            error.message += f" (server {asked})"
        return error

    def _not_connected(self, error: NotSent, connection: Connection) -> WaldError:
        """The failure of TLS behind a connection that could not be made, if there is one. The channel is given up
        then: gRPC would try again at its own pace, and would never read the files again."""
        problem = problem_of(error.message, self._files, connection.endpoint.rpartition(":")[0].strip("[]"))
        if self._nodes.uses(connection):
            if problem is not None:
                self._tls_failure = problem
                self._nodes.pause(connection.endpoint, problem)
            if self._credentials is not None and self._credentials.renew():
                self._nodes.give_up_all()
            elif problem is not None:
                self._nodes.give_up(connection.endpoint)
        return problem or error

    def _answered(self, connection: Connection, metadata=()) -> None:
        """A call has been answered. `metadata` is that before the answer."""
        self._tls_failure = None
        if self._own is None:
            self._nodes.approach(connection.endpoint, metadata, self._owner_at, self._connect_timeout)

    def _owner_at(self, named: str) -> str:
        """The owner of this name. Raises ValueError or TokenError if the client must not call it."""
        owner = owner_at(named)
        self._refuse_plaintext(owner)
        return owner

    def _used_token(self) -> str | None:
        """The token that a call carries which begins now."""
        return None if self._token is None else self._token.current()

    def _allows(self, repeat: Repeat, error: WaldError, used: str | None, waits: bool = False) -> bool:
        """Whether to send a request again after this error. A server that refused the token applied nothing: the
        request is sent again once there is another token. `waits`: producers and followers also wait until an
        expired one is replaced in its file."""
        if isinstance(error, (BadCredential, CredentialExpired)):
            if self._token is None or used is None:
                return False
            expired = isinstance(error, CredentialExpired)
            return self._token.changed(used) or (waits and expired and self._token.follows_a_file)
        return repeat.allows(error)

    async def _call(self, name: str, request, repeat: Repeat, timeout: Seconds | None, appends: Appends | None = None):
        """Makes a unary call, and repeats it as far as that is safe and the deadline reaches. `name` is that of a
        stub and a method, because another attempt may have another server or channel. With `appends` it shares a stream
        with others if it can."""
        now = asyncio.get_running_loop().time
        method = attrgetter(name)
        deadline = now() + to_seconds(self.timeout if timeout is None else timeout)
        failures = 0
        unknown = False
        # The last attempt followed at once, without a pause.
        hurried = False
        while True:
            if self._closed:
                raise RuntimeError("the client is closed")
            used = self._used_token()
            owned = False
            connection = None
            try:
                connection = self._open()
                if appends is not None:
                    answer = await appends.answer_of(connection, request, used, deadline)
                    if answer is not None:
                        return answer
                    connection = self._open()
                # The server must not write a request that no caller waits for any more.
                answer, metadata = await _answer_of(method(self), request, max(deadline - now(), 0.0))
                self._answered(connection, metadata)
                return answer
            except grpc.aio.AioRpcError as failure:
                error = self._error(failure.code(), failure.details() or "", failure.trailing_metadata(), connection)
                owned = self._nodes.follows(connection.endpoint, error)
            except WaldError as failure:
                error = failure
                owned = connection is not None and self._nodes.follows(connection.endpoint, error)
            failures += 1
            # Two servers that name each other must not make the client spin.
            hurried = owned and not hurried
            pause = 0.0 if hurried else self.retry.pause(failures, error)
            tired = failures >= self.retry.max_attempts or now() + pause >= deadline
            if self._closed or tired or not self._allows(repeat, error, used):
                if repeat is Repeat.READ:
                    raise error.of_read()
                raise error.after_unknown() if unknown else error
            unknown = unknown or error.outcome is Outcome.UNKNOWN
            await asyncio.sleep(pause)


def settings_of_env(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment, and these in their place."""
    names = {
        "endpoint": "WALD_ENDPOINT",
        "tls_ca": "WALD_TLS_CA",
        "tls_cert": "WALD_TLS_CERT",
        "tls_key": "WALD_TLS_KEY",
        "server_name": "WALD_TLS_SERVER_NAME",
    }
    if "token" not in settings and "token_file" not in settings:
        found = "WALD_TOKEN_FILE" if os.environ.get("WALD_TOKEN_FILE") else "WALD_TOKEN"
        names["token_file" if found == "WALD_TOKEN_FILE" else "token"] = found
    found = {name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)}
    return {**found, **settings}


async def _answer_of(method, request, timeout: float):
    """The answer, and the metadata before it. A call that has failed must not stay in a variable of a task: its channel would
    count it among the calls that it waits for when it is closed, and would connect again meanwhile."""

    async def answer():
        call = method(request, timeout=timeout)
        return await call, await call.initial_metadata()

    # In a task of its own: the end of the channel cancels its calls, which must not look like a cancelled caller.
    answering = asyncio.ensure_future(answer())
    # A cancelled caller does not take the error.
    answering.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([answering])
        if answering.cancelled():
            raise connection_lost("the channel was closed")
        return answering.result()
    finally:
        answering.cancel()
        # An error refers to this frame, and would keep itself.
        del answering


def one_start(**starts) -> None:
    """Refuses to begin in two places."""
    given = [name for name, value in starts.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"at most one of {', '.join(given)} says where to begin")


def _tls_files(ca, cert, key, server_name, secure: bool, own_channel: bool) -> TlsFiles | None:
    """The settings of TLS; None: plaintext, or one's own channel."""
    paths = [None if path is None else os.fspath(path) for path in (ca, cert, key)]
    files = TlsFiles(*paths, server_name)
    if files and own_channel:
        raise ValueError("a channel of one's own excludes settings of TLS")
    if files and not secure:
        raise ValueError("with settings of TLS the endpoint must begin with https://")
    return files if secure and not own_channel else None


def _milliseconds(span: Seconds) -> int:
    return max(round(to_seconds(span) * 1000), 1)
