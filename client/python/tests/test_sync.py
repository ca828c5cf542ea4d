"""The synchronous client: the same members as the asyncio client, and the waits of threads."""

import asyncio
import concurrent.futures
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import grpc.aio
import pytest
from fake import REFUSED, Elsewhere, message, no_server, refusal, until

import wald
import wald.sync
from wald import blocking
from wald.records import LogBatch
from wald.v1 import wal_pb2

FOLDER = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(FOLDER))
import generate_sync  # noqa: E402

CLASSES = ["Client", "Session", "Producer", "DurableProducer", "Scan", "DurableFollower"]
# Members without a counterpart in the asyncio client.
ADDED = {"Client": {"run"}, "Scan": {"next"}, "DurableFollower": {"next"}}


@pytest.fixture
def server():
    with Elsewhere() as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def members(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def arguments(function):
    """Name, kind and default of each argument."""
    given = list(inspect.signature(function).parameters.values())
    if any(one.name == "arguments" for one in given):
        # `follow` and `durable_follower` pass them on to `scan`.
        given = [one for one in given if one.name != "arguments"]
        known = {one.name for one in given} | {"follow"}
        given += [one for one in inspect.signature(wald.Client.scan).parameters.values() if one.name not in known]
    return [(one.name, one.kind, one.default) for one in given]


# The members.


def test_module_is_generated_from_the_asyncio_client():
    assert generate_sync.TARGET.read_text(encoding="utf-8") == generate_sync.generate(), "install the package again"


@pytest.mark.parametrize("name", CLASSES)
def test_every_member_of_the_asyncio_client_is_there(name):
    asynchronous, synchronous = getattr(wald, name), getattr(wald.sync, name)
    assert members(asynchronous) - generate_sync.ONLY_ASYNC <= members(synchronous)
    attributes = {"timeout", "silence_timeout", "retry", "log", "id", "epoch", "sequence", "log_id", "error", "cursor", "interruption"}
    assert members(synchronous) - members(asynchronous) - attributes == ADDED.get(name, set())
    for member in members(asynchronous) - generate_sync.ONLY_ASYNC:
        one, other = (inspect.getattr_static(kind, member) for kind in (asynchronous, synchronous))
        assert isinstance(one, property) == isinstance(other, property), member
        if isinstance(one, property):
            continue
        one, other = getattr(asynchronous, member), getattr(synchronous, member)
        assert arguments(one) == arguments(other), member
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            assert "block" in other.__doc__.lower(), f"{member} does not say how long it blocks"
        hints = inspect.signature(other)
        assert "Any" not in str(hints) and hints.return_annotation is not hints.empty, member


def test_constructor_takes_the_same_settings():
    assert arguments(wald.Client.__init__) == arguments(wald.sync.Client.__init__)
    assert list(wald.sync.Settings.__annotations__) == [name for name, _, _ in arguments(wald.Client)]


@pytest.mark.parametrize("name", CLASSES)
def test_attributes_of_objects_are_there(server, tmp_path, name):
    with server.client() as client:
        made = {
            "Client": lambda: client,
            "Session": client.session,
            "Producer": lambda: client.producer("log"),
            "DurableProducer": lambda: client.durable_producer("log", tmp_path / "state"),
            "Scan": lambda: client.scan("log"),
            "DurableFollower": lambda: client.durable_follower("log", state=tmp_path / "state"),
        }[name]()
        public = {attribute for attribute in vars(made._inner) if not attribute.startswith("_")}
        assert public <= members(type(made))
        for attribute in public:
            assert getattr(made, attribute) == getattr(made._inner, attribute)
        if name == "Session":
            made.abort()


# Calls.


def test_calls_have_the_results_and_errors_of_the_asyncio_client(server, client):
    ack = client.append("log", "a", timeout=5)
    assert isinstance(ack, wald.Ack) and ack.lsn == 1
    assert client.tail("log").tail_lsn == 7
    server.fake.script.append(refusal(grpc.StatusCode.FAILED_PRECONDITION, "FENCED", {**REFUSED, "writer_epoch": "3"}))
    with pytest.raises(wald.Fenced) as refused:
        client.append("log", "b")
    assert refused.value.number("writer_epoch") == 3 and refused.value.outcome is wald.Outcome.NOT_APPLIED
    with pytest.raises(ValueError, match="at most one"):
        client.read("log", lsn=1, tail_offset=2)
    with pytest.raises(ValueError, match="exactly one"):
        client.scan("log", prefix="l")
    client.timeout = 3.0
    assert client.timeout == client._inner.timeout == 3.0


def test_call_without_an_answer_ends_at_its_timeout(server, client):
    server.soon(server.fake.answers.clear)
    with pytest.raises(wald.DeadlineExceeded):
        client.append("log", "a", timeout=0.05)
    with no_server() as endpoint, wald.sync.Client(endpoint, timeout=0.5) as nobody:
        with pytest.raises(wald.NotSent):
            nobody.append("log", "a")


def test_wrong_setting_is_refused_at_once():
    with pytest.raises(ValueError, match="https"):
        wald.sync.Client("127.0.0.1:1", tls_ca="ca.pem")


def test_environment_names_the_server(server, monkeypatch):
    monkeypatch.setenv("WALD_ENDPOINT", server.endpoint)
    with wald.sync.Client.from_env(timeout=4) as client:
        assert client.timeout == 4 and client.endpoint == server.endpoint
        assert client.append("log", "a").lsn == 1


def test_list_is_read_page_by_page(server, client):
    server.fake.names = ["a", "b", "c"]
    assert [log.name for log in client.list_logs()] == ["a", "b", "c"]
    server.fake.attempts.clear()
    with client.list_logs() as logs:
        assert next(logs).name == "a"
    assert list(logs) == [] and len(server.fake.attempts) == 1


def test_function_runs_with_the_asyncio_client(client):
    answer = client.run(lambda asynchronous: asynchronous.wal.GetTail(wal_pb2.GetTailRequest(log="log")))
    assert answer.tail_lsn == 7


def test_channel_is_made_on_the_event_loop(server):
    made = []

    def channel():
        assert asyncio.get_running_loop()
        made.append(grpc.aio.insecure_channel(server.endpoint))
        return made[0]

    with wald.sync.Client(channel=channel) as client:
        assert not made
        assert [client.append("log", "a").lsn, client.append("log", "b").lsn] == [1, 2]
    assert len(made) == 1

    def broken():
        raise OSError("no way")

    with wald.sync.Client(channel=broken) as client:
        for _ in range(2):
            with pytest.raises(OSError, match="no way"):
                client.append("log", "a")


def test_generator_of_the_program_runs_on_its_thread(client):
    seen = []

    def records():
        seen.append(threading.current_thread())
        yield str(client.tail("log").tail_lsn)

    with client.session() as session:
        session.send(LogBatch("log", records()) for _ in range(1)).result()
    with client.producer("log") as producer:
        producer.send(records()).result()
    assert seen == [threading.current_thread()] * 2


# Sessions and producers.


def test_acks_are_futures_of_threads(server, client):
    with client.producer("log") as producer:
        acks = [producer.append(str(number)) for number in range(100)]
        done, _ = concurrent.futures.wait(acks, 20)
        assert len(done) == 100 and [ack.result().lsn for ack in acks] == list(range(100))
        assert producer.send(["x", "y"]).result().first_lsn == 100
        assert producer.sequence > 0 and producer.log_id == 42
    assert server.fake.data() == [str(number) for number in range(100)] + ["x", "y"]


def test_wait_for_an_ack_has_a_time_limit(server, client):
    server.soon(server.fake.open.clear)
    with client.session() as session:
        ack = session.send([LogBatch("log", ["a"])])
        with pytest.raises(TimeoutError, match="in time"):
            ack.result(0.01)
        with pytest.raises(TimeoutError, match="in time"):
            ack.exception(0.01)
        assert not ack.cancel()
        server.soon(server.fake.open.set)
        assert ack.result(20).appends[0].first_lsn == 0


def test_failure_of_a_session_is_raised_as_in_asyncio(server, client):
    server.fake.script.append(None)
    server.fake.script.append(refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", {**REFUSED, "request_id": "1"}))
    with pytest.raises(wald.WaldError) as refused:
        with client.session() as session:
            acks = [session.send([LogBatch("log", [str(number)])]) for number in range(2)]
            assert acks[0].exception() is None
            assert acks[1].exception().outcome is wald.Outcome.NOT_APPLIED
    assert refused.value is session.error


def test_callback_cannot_wait_for_its_own_thread(client):
    found = []
    called = threading.Event()

    def callback(ack):
        try:
            client.append("log", "b")
        except RuntimeError as error:
            found.append((ack.result().lsn, str(error)))
        called.set()

    with client.producer("log") as producer:
        producer.append("a").add_done_callback(callback)
        assert called.wait(20)
    assert found[0][0] == 0 and "thread of the client" in found[0][1]


def test_durable_producer_and_follower_go_on(server, client, tmp_path):
    for number in range(2):
        with client.durable_producer("log", tmp_path / "producer") as producer:
            assert producer.next_sequence == number
            producer.append_batch(iter([str(number)]))
            producer.flush()
    assert server.fake.data() == ["0", "1"]
    for item in (message(b"1", (0, ["a"])), message(b"2", (1, ["b"]))):
        server.soon(server.fake.messages.put_nowait, item)
    with client.durable_follower("log", state=tmp_path / "follower") as follower:
        assert follower.effects is None
        [batch] = next(follower)
        follower.keep(batch.records[0].text)
        with pytest.raises(wald.StateError):
            client.durable_follower("log", state=tmp_path / "follower").open()
    with client.durable_follower("log", state=tmp_path / "follower") as follower:
        assert follower.effects == b"a" and follower.cursor == b"1"
    assert server.fake.scans[-1].cursor == b"1"


# Followers.


def test_follower_is_an_iterator(server, client):
    for item in (message(b"1", (0, ["a", "b"])), message(b"2", (2, ["c"]))):
        server.soon(server.fake.messages.put_nowait, item)
    seen = []
    for event in client.follow("log"):
        seen += [record.text for _, record in event.records()]
        if len(seen) == 3:
            break
    assert seen == ["a", "b", "c"]
    # The iterator is gone, and its stream with it.
    del event
    gc.collect()
    server.until(lambda: server.fake.underway == 0)


def test_impatient_caller_loses_nothing(server, client):
    with client.follow("log") as follower:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                follower.next(timeout=0.02)
        server.soon(server.fake.messages.put_nowait, message(b"1", (0, ["a"])))
        assert follower.next(timeout=20).cursor == b"1"
    assert len(server.fake.scans) == 1


@pytest.mark.parametrize("durable", [False, True])
def test_item_that_comes_when_the_caller_gives_up_is_handed_out_again(server, client, tmp_path, monkeypatch, durable):
    monkeypatch.setattr(blocking, "_CANCEL_SECONDS", 0)
    taken, given_up = threading.Event(), threading.Event()

    def hold(step):
        async def held():
            item = await step()
            # The event loop has the item, and is too busy to pass it on in time.
            taken.set()
            assert given_up.wait(20)
            return item

        return held

    server.soon(server.fake.messages.put_nowait, message(b"1", (0, ["a"])))
    with client.durable_follower("log", state=tmp_path / "state") if durable else client.follow("log") as follower:
        monkeypatch.setattr(follower, "_step", hold(follower._step))
        while not taken.is_set():
            with pytest.raises(TimeoutError):
                follower.next(timeout=0.02)
        given_up.set()
        item = follower.next(timeout=20)
        batches = item if durable else item.batches
        assert [record.text for batch in batches for record in batch.records] == ["a"]
        assert follower.cursor == b"1"


@pytest.mark.parametrize("durable", [False, True])
def test_error_that_comes_when_the_caller_gives_up_is_raised_later(server, client, tmp_path, monkeypatch, durable):
    monkeypatch.setattr(blocking, "_CANCEL_SECONDS", 0)
    taken, given_up = threading.Event(), threading.Event()

    def hold(step):
        async def held():
            try:
                return await step()
            except wald.WaldError:
                # The event loop has the error, and is too busy to pass it on in time.
                taken.set()
                assert given_up.wait(20)
                raise

        return held

    behind_a_gap = message(b"1", (5, ["a"]))
    behind_a_gap.gaps.add(log="log", from_lsn=0, to_lsn=5)
    refused = refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SCAN", REFUSED)
    with client.durable_follower("log", state=tmp_path / "state") if durable else client.follow("log") as follower:
        server.soon(server.fake.messages.put_nowait, behind_a_gap if durable else refused)
        monkeypatch.setattr(follower, "_step", hold(follower._step))
        while not taken.is_set():
            with pytest.raises(TimeoutError):
                follower.next(timeout=0.02)
        given_up.set()
        with pytest.raises(wald.RecordsMissing if durable else wald.InvalidRequest):
            follower.next(timeout=20)
        if durable:
            [batch] = follower.next(timeout=20)
            assert batch.records[0].text == "a"
        else:
            with pytest.raises(StopIteration):
                follower.next(timeout=20)


def test_another_thread_closes_a_follower(server, client):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        follower = client.follow("log")
        events = pool.submit(list, follower)
        server.until(lambda: server.fake.underway == 1)
        follower.close()
        assert events.result(20) == []
    with pytest.raises(StopIteration):
        next(follower)
    server.until(lambda: server.fake.underway == 0)


def test_another_thread_closes_a_follower_that_connects():
    with no_server() as endpoint, wald.sync.Client(endpoint, timeout=600) as client:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            follower = client.follow("log", lsn=0)
            events = pool.submit(list, follower)
            client.run(lambda _: until(lambda: follower.interruption is not None))
            follower.close()
            assert events.result(20) == []


def test_threads_share_a_follower(server, client):
    with client.follow("log") as follower, concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(next, follower) for _ in range(4)]
        for number in range(4):
            server.soon(server.fake.messages.put_nowait, message(b"%d" % number, (number, ["a"])))
        assert sorted(one.result(20).cursor for one in waiting) == [b"0", b"1", b"2", b"3"]


# Threads, loops, signals, the end.


def test_threads_share_a_client(server, client):
    def work(number):
        for turn in range(25):
            client.append("log", f"{number} {turn}")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    came = server.fake.sent()
    assert sorted(came) == sorted(f"{number} {turn}" for number in range(8) for turn in range(25))
    for number in range(8):
        turns = [int(data.split()[1]) for data in came if data.startswith(f"{number} ")]
        assert turns == sorted(turns)


def test_call_in_a_running_event_loop_is_refused(server, client, monkeypatch):
    server.soon(server.fake.open.clear)
    session = client.session()
    ack = session.send([LogBatch("log", ["a"])])

    async def calls():
        for call in (lambda: client.append("log", "a"), lambda: client.scan("log"), client.__enter__, client.close):
            with pytest.raises(RuntimeError, match="runs an event loop"):
                call()
        with pytest.raises(RuntimeError, match="runs an event loop"):
            ack.result()
        assert (await asyncio.to_thread(client.append, "log", "b")).lsn > 0
        # A notebook runs each cell in an event loop, which the cell may block.
        shell = types.SimpleNamespace(kernel=object())
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
        assert client.append("log", "c").lsn > 0

    asyncio.run(calls())
    session.abort()


@pytest.fixture
def interruptible():
    """Lets SIGINT interrupt. A shell that starts the tests in the background makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(server, holds):
    """A thread that sends SIGINT to the main thread once `holds()`."""

    def interrupt():
        server.until(holds)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads")
def test_keyboard_interrupt_cancels_the_call(server, client, interruptible):
    server.soon(server.fake.answers.clear)
    thread = interrupt_when(server, lambda: server.fake.underway == 1)
    with pytest.raises(KeyboardInterrupt):
        client.append("log", "a", timeout=60)
    thread.join()
    # The server sees the end of the call.
    server.until(lambda: server.fake.underway == 0)
    server.soon(server.fake.answers.set)
    assert client.append("log", "b").lsn == 2


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads")
def test_event_that_no_caller_got_is_handed_out_again(server, client, tmp_path, interruptible):
    for follower in (client.follow("log"), client.durable_follower("log", state=tmp_path / "state")):
        server.fake.scans.clear()
        follower.open()
        waits = follower._inner.__anext__
        begun = threading.Event()

        async def comes_late(waits=waits, begun=begun):
            begun.set()
            try:
                return await waits()
            except asyncio.CancelledError:
                server.soon(server.fake.messages.put_nowait, message(b"1", (0, ["a"])))
                return await waits()

        follower._inner.__anext__ = comes_late
        thread = interrupt_when(server, begun.is_set)
        with pytest.raises(KeyboardInterrupt):
            next(follower)
        thread.join()
        del follower._inner.__anext__
        client.run(lambda _: asyncio.sleep(0))
        assert follower.cursor is None
        event = next(follower)
        assert [record.text for batch in getattr(event, "batches", event) for record in batch] == ["a"]
        assert follower.cursor == b"1"
        follower.close()
        server.until(lambda: server.fake.underway == 0)


def test_close_ends_calls_of_other_threads(server):
    client = server.client()
    server.soon(server.fake.answers.clear)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        append = pool.submit(client.append, "log", "a", timeout=60)
        events = pool.submit(lambda: list(client.follow("log")))
        server.until(lambda: server.fake.underway == 2)
        client.close(grace=0)
        client.close()
        assert isinstance(append.exception(20), wald.ConnectionLost)
        assert append.exception().outcome is wald.Outcome.UNKNOWN
        assert events.result(20) == []
    assert client.closed
    for call in (lambda: client.append("log", "a"), lambda: client.scan("log"), client.session):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_close_gives_every_ack_a_result(server):
    client = server.client()
    server.soon(server.fake.open.clear)
    session = client.session()
    acks = [session.send([LogBatch("log", ["a"])]) for _ in range(3)]
    client.close(grace=0)
    assert all(isinstance(ack.exception(20), wald.WaldError) for ack in acks)
    session.abort()


def test_client_that_was_never_used_closes():
    client = wald.sync.Client("127.0.0.1:1")
    client.close()
    assert client.closed
    with pytest.raises(RuntimeError, match="closed"):
        client.append("log", "a")


def test_unreferenced_client_ends_its_thread(server):
    client = server.client()
    client.append("log", "a")
    thread = client._loop._thread
    del client
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def program(text, *arguments):
    """The output of a program, which must end well and without noise."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", text, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_program_that_does_not_close_ends(server):
    text = """
import sys
import wald.sync
client = wald.sync.Client(sys.argv[1])
print(client.append("log", "a").lsn)
follower = client.follow("log")
follower.open()
"""
    assert program(text, server.endpoint) == ("1\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_client_that_was_used_before_a_fork_is_refused(server):
    text = """
import os, sys
# The handlers of gRPC crash the child at times, and the client must refuse it without them.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
import wald.sync
used, unused = wald.sync.Client(sys.argv[1]), wald.sync.Client(sys.argv[1])
session = used.session()
ack = session.send([wald.LogBatch("log", ["a"])])
ack.result()
if os.fork() == 0:
    for call in (lambda: used.append("log", "a"), session.close, lambda: unused.append("log", "a")):
        try:
            call()
        except RuntimeError as error:
            print("fork" in str(error))
    session.abort()
    used.close()
    unused.close()
    print(used.closed, unused.closed, flush=True)
    os._exit(0)
print(os.wait()[1], used.append("log", "b").lsn, flush=True)
session.close()
used.close()
"""
    out, _ = program(text, server.endpoint)
    assert out.split() == ["True", "True", "True", "True", "True", "0", "2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_client_that_was_not_used_before_a_fork_works(server):
    text = """
import os, sys
import wald.sync
client = wald.sync.Client(sys.argv[1])
child = os.fork()
with client:
    client.append("log", "a")
if child:
    print(os.wait()[1])
"""
    out, _ = program(text, server.endpoint)
    assert out == "0\n" and len(server.fake.attempts) == 2
