"""A server that follows a test's script: answers and failures that no daemon gives on demand."""

import asyncio
import contextlib
import socket
import threading
from collections import deque

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

import wald
from wald.v1 import log_pb2, log_pb2_grpc, record_pb2, types_pb2, wal_pb2, wal_pb2_grpc

NOT_APPLIED = {"outcome": "NOT_APPLIED", "retry": "SAFE"}
REFUSED = {"outcome": "NOT_APPLIED", "retry": "NEVER"}
UNKNOWN = {"outcome": "UNKNOWN", "retry": "SAFE_WITH_CONDITION"}
# A failure that the client must take for a broken connection: no ErrorInfo.
LOST = (grpc.StatusCode.UNAVAILABLE, "Socket closed", ())


def refusal(code, reason, facts, *, failed=(), delay_ms=None, domain="wald.dev", message="refused"):
    """A status as Wald sends it: code, message, trailing metadata."""
    details = [error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=facts)]
    if failed:
        violation = error_details_pb2.PreconditionFailure.Violation
        violations = [violation(type=type, subject=log, description=text) for type, log, text in failed]
        details.append(error_details_pb2.PreconditionFailure(violations=violations))
    if delay_ms is not None:
        delay = duration_pb2.Duration(nanos=delay_ms * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    return code, message, (("grpc-status-details-bin", status.SerializeToString()),)


DRAINING = refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", NOT_APPLIED)


def moved(owner):
    """The answer of a server that does not own the store."""
    return refusal(grpc.StatusCode.UNAVAILABLE, "MOVED", {**NOT_APPLIED, "owner": owner, "term": "7"})


def expired(first_epoch, request_id):
    """The answer of a server that has forgotten the producer."""
    facts = {**REFUSED, "first_epoch": str(first_epoch), "request_id": str(request_id)}
    return refusal(grpc.StatusCode.FAILED_PRECONDITION, "PRODUCER_EXPIRED", facts)


class Unanswered(tuple):
    """A failure of a session's stream after the request was applied."""


class Ends(tuple):
    """A failure that ends a stream of independent requests, though it could answer one of them."""


def message(cursor, *batches):
    """A piece of a scan: for each batch its first lsn and its records."""
    return wal_pb2.ScanResponse(
        cursor=cursor,
        batches=[
            record_pb2.RecordBatch(
                log="log", first_lsn=first, records=[record_pb2.Record(data=data.encode()) for data in records]
            )
            for first, records in batches
        ],
    )


class Fake(wal_pb2_grpc.WalServiceServicer, log_pb2_grpc.LogServiceServicer):
    """`script`: results of the next appends, one by one: a failure, or None for an ack; later
    ones get `refuses`, the failure of every call of a server that serves nobody, or an ack.

    A session treats each request as Wald treats a producer's: the next sequence is appended,
    a known one acked again. Independent requests count as appends; of their failures, those that are about
    the server or the caller, or are not Wald's, end the stream.
    """

    def __init__(self):
        # The methods of the calls that append.
        self.calls = []
        # The answers to come on each independent stream.
        self.streams = []
        # Independent streams that the client has half-closed; those that then ended with all answers.
        self.half_closed = 0
        self.ended_well = 0
        # The metadata of these streams.
        self.metadata = []
        # Answers to records with these data wait for their events.
        self.held = {}
        self.script = deque()
        self.refuses = None
        # The owner that answers through this server, as HOST:PORT; None: this server answers.
        self.speaks_for = None
        self.attempts = []
        self.applied = {}
        self.log_exists = False
        # GetLog does not see the log that often: another client makes it after the question.
        self.unseen = 0
        # CreateLog is not allowed.
        self.makes_no_log = False
        # The calls of GetLog and CreateLog.
        self.log_calls = []
        self.first_producer_epoch = 0
        # Producers of epochs below it are forgotten.
        self.forgotten_below = 0
        # The number of applied batches at which it forgets their producer.
        self.forgets_at = None
        # Called with each request of a session.
        self.arrived = lambda request: None
        self.forgotten = []
        # The number of next sessions that apply everything and ack nothing.
        self.held_sessions = 0
        # Acks wait for it.
        self.open = asyncio.Event()
        self.open.set()
        # The results of scans: messages, failures; and the requests.
        self.messages = asyncio.Queue()
        self.scans = []
        # Scans and appends that the client has not ended.
        self.underway = 0
        # Appends and reads wait for it, and scans before they begin.
        self.answers = asyncio.Event()
        self.answers.set()
        # The names of logs, one on each page.
        self.names = []

    async def _follow_script(self, request, context):
        self.attempts.append(request)
        failure = self.script.popleft() if self.script else self.refuses
        if failure is not None and not isinstance(failure, Unanswered):
            await context.abort(*failure)
        return failure

    async def _refuse(self, context):
        if self.refuses is not None:
            await context.abort(*self.refuses)

    def _metadata(self):
        return () if self.speaks_for is None else (("wald-owner", self.speaks_for),)

    async def Append(self, request, context):
        self.calls.append("Append")
        await self._follow_script(request, context)
        self.underway += 1
        try:
            await self.answers.wait()
        finally:
            self.underway -= 1
        await context.send_initial_metadata(self._metadata())
        return self._ack()

    async def AppendBatch(self, request, context):
        self.calls.append("AppendBatch")
        await self._follow_script(request, context)
        return self._batch_ack(request)

    def _ack(self):
        return wal_pb2.AppendResponse(lsn=len(self.attempts), durability=types_pb2.DURABILITY_DURABLE)

    def _batch_ack(self, request):
        at = len(self.attempts)
        appends = []
        for batch in request.batches:
            end = at + len(batch.records)
            append = wal_pb2.LogAppend(log=batch.log, first_lsn=at, next_lsn=end, durable_lsn=end, timestamp_us=9, log_id=42)
            appends.append(append)
        return wal_pb2.AppendBatchResponse(appends=appends, durability=types_pb2.DURABILITY_DURABLE, position=77)

    async def GetTail(self, request, context):
        await self._follow_script(request, context)
        return wal_pb2.GetTailResponse(first_lsn=0, tail_lsn=7, durable_lsn=7, writer_epoch=0)

    async def Read(self, request, context):
        await self._follow_script(request, context)
        self.underway += 1
        try:
            await self.answers.wait()
        finally:
            self.underway -= 1
        return wal_pb2.ReadResponse()

    async def CreateLog(self, request, context):
        self.log_calls.append("CreateLog")
        await self._refuse(context)
        if self.makes_no_log:
            await context.abort(*refusal(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED", REFUSED))
        if self.log_exists:
            await context.abort(*refusal(grpc.StatusCode.ALREADY_EXISTS, "LOG_EXISTS", REFUSED))
        self.log_exists = True
        return log_pb2.CreateLogResponse(log=self._log(request.log))

    async def ListLogs(self, request, context):
        self.attempts.append(request)
        at = int(request.page_token or 0)
        more = str(at + 1) if at + 1 < len(self.names) else ""
        return log_pb2.ListLogsResponse(logs=[self._log(self.names[at])], next_page_token=more)

    async def GetLog(self, request, context):
        self.log_calls.append("GetLog")
        await self._refuse(context)
        if not self.log_exists or self.unseen > 0:
            self.unseen -= 1
            await context.abort(*refusal(grpc.StatusCode.NOT_FOUND, "LOG_NOT_FOUND", REFUSED))
        return log_pb2.GetLogResponse(log=self._log(request.log))

    async def ForgetProducer(self, request, context):
        self.forgotten.append((request.producer_id, request.log_id))
        return log_pb2.ForgetProducerResponse()

    def _log(self, name):
        return log_pb2.Log(name=name, log_id=42, first_producer_epoch=self.first_producer_epoch)

    async def AppendSession(self, requests, context):
        if self.speaks_for is not None:
            await context.send_initial_metadata(self._metadata())
        held = None
        async for request in requests:
            if request.independent:
                async for answer in self._independent(request, requests, context):
                    yield answer
                return
            await self.open.wait()
            if held is None:
                held = self.held_sessions > 0
                self.held_sessions -= held
            self.arrived(request)
            failure = await self._follow_script(request, context)
            batch = request.batch.batches[0]
            producer = batch.condition.producer if batch.condition.HasField("producer") else None
            if producer is not None and producer.epoch < self.forgotten_below:
                await context.abort(*expired(self.forgotten_below, request.request_id))
            key = f"plain {len(self.applied)}" if producer is None else (producer.epoch, producer.sequence)
            repeat = key in self.applied
            if not repeat:
                self.applied[key] = (sum(len(b.records) for _, b in self.applied.values()), batch)
            first_lsn = self.applied[key][0]
            if not repeat and len(self.applied) == self.forgets_at:
                self.forget()
            if failure is not None:
                await context.abort(*failure)
            if held:
                continue
            append = wal_pb2.LogAppend(
                log=batch.log, first_lsn=first_lsn, next_lsn=first_lsn + len(batch.records), deduplicated=repeat
            )
            ack = wal_pb2.AppendBatchResponse(appends=[append], durability=types_pb2.DURABILITY_DURABLE)
            yield wal_pb2.AppendSessionResponse(request_id=request.request_id, ack=ack)

    async def _independent(self, first, requests, context):
        self.calls.append("AppendSession")
        self.metadata.append(dict(context.invocation_metadata()))
        answers = asyncio.Queue()
        self.streams.append(answers)
        working = {asyncio.create_task(self._read_independent(first, requests, answers))}
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, tuple):
                    await context.abort(*answer)
                yield answer
            self.ended_well += 1
        finally:
            self.streams.remove(answers)
            for task in working:
                task.cancel()

    async def _read_independent(self, request, requests, answers):
        """Each request is answered when it is done. None: all are, and no more come."""
        working = set()
        try:
            while request is not grpc.aio.EOF:
                working.add(asyncio.create_task(self._answer(request, answers)))
                # The script gives the failures in the order of the requests.
                await asyncio.sleep(0)
                request = await anext(requests, grpc.aio.EOF)
            self.half_closed += 1
            await asyncio.gather(*working)
            answers.put_nowait(None)
        finally:
            for task in working:
                task.cancel()

    async def _answer(self, request, answers):
        content = request.append if request.HasField("append") else request.batch
        self.attempts.append(content)
        failure = self.script.popleft() if self.script else self.refuses
        answer = wal_pb2.AppendSessionResponse(request_id=request.request_id)
        if failure is not None:
            code, _, metadata = failure
            whole = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
            if isinstance(failure, (Ends, Unanswered)) or code in whole or not metadata:
                answers.put_nowait(tuple(failure))
                return
            answer.error = metadata[0][1]
        else:
            self.underway += 1
            try:
                await self.answers.wait()
                for data in records_of(content):
                    if data in self.held:
                        await self.held[data].wait()
            finally:
                self.underway -= 1
            if request.HasField("append"):
                answer.append_ack.CopyFrom(self._ack())
            else:
                answer.ack.CopyFrom(self._batch_ack(request.batch))
        answers.put_nowait(answer)

    async def Scan(self, request, context):
        self.scans.append(request)
        await self._refuse(context)
        self.underway += 1
        try:
            await self.answers.wait()
            await context.send_initial_metadata(self._metadata())
            while True:
                message = await self.messages.get()
                if isinstance(message, tuple):
                    await context.abort(*message)
                yield message
        finally:
            self.underway -= 1

    async def end_streams(self, client, status=None):
        """Ends the independent streams, as a change of the owner or of a credential does; None: in good order. Returns when
        the client knows."""
        for answers in self.streams:
            answers.put_nowait(status)
        await until(lambda: not client._appends._streams)

    def forget(self):
        """Forgets the producer of all batches so far."""
        self.forgotten_below += 1

    def sent(self):
        """The data of all records that appends and batches brought, also those that were refused, in order."""
        return [data for request in self.attempts for data in records_of(request)]

    def data(self):
        """The applied records, in order."""
        return [record.data.decode() for _, batch in self.applied.values() for record in batch.records]


def records_of(request):
    """The data of the records in an append, or in a batch."""
    if isinstance(request, wal_pb2.AppendRequest):
        return [request.record.data.decode()]
    return [record.data.decode() for batch in request.batches for record in batch.records]


async def until(holds, seconds=20):
    """Lets other tasks run until `holds()`; fails after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "the condition never held"
        await asyncio.sleep(0)


async def turns(number=1000):
    """Gives other tasks that many turns: those that wait for no server come to their next wait."""
    for _ in range(number):
        await asyncio.sleep(0)


async def endlessly(send, seconds=20):
    """Calls `send` again and again, until the session interrupts; fails after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        await send()
        await asyncio.sleep(0)
    raise AssertionError("nothing interrupted it")


@contextlib.contextmanager
def no_server():
    """An endpoint that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@contextlib.asynccontextmanager
async def running(credentials=None, *, interceptors=()):
    """A fake, and its port. With credentials it speaks TLS."""
    server = grpc.aio.server(interceptors=interceptors)
    fake = Fake()
    wal_pb2_grpc.add_WalServiceServicer_to_server(fake, server)
    log_pb2_grpc.add_LogServiceServicer_to_server(fake, server)
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield fake, port
    finally:
        await server.stop(0)


class Elsewhere:
    """A fake that serves on a thread of its own, for tests that block."""

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._running = running()
        self.fake, port = self.do(self._running.__aenter__)
        self.endpoint = f"127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        self.do(self._running.__aexit__, None, None, None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, function, *arguments):
        """The result of a coroutine function on that thread."""
        return asyncio.run_coroutine_threadsafe(function(*arguments), self._loop).result(30)

    def until(self, holds):
        """Waits until `holds()`."""
        self.do(until, holds)

    def soon(self, function, *arguments):
        """Calls a plain function on that thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def client(self, **settings):
        """A synchronous client, whose pauses are short."""
        return wald.sync.Client(self.endpoint, **{"retry": wald.RetryPolicy(first_pause=0.001, max_pause=0.01), **settings})


@contextlib.asynccontextmanager
async def serving(credentials=None, *, interceptors=(), client_interceptors=(), **settings):
    """A fake, and a client of it whose pauses are short. With credentials it speaks TLS."""
    scheme = "http" if credentials is None else "https"
    settings = {"retry": wald.RetryPolicy(first_pause=0.001, max_pause=0.01), **settings}
    async with running(credentials, interceptors=interceptors) as (fake, port):
        async with wald.Client(f"{scheme}://127.0.0.1:{port}", interceptors=client_interceptors, **settings) as client:
            yield fake, client
