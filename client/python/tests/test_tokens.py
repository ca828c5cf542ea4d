"""Tokens: every call carries one, and a refused one is read again from its file."""

import asyncio

import grpc
import grpc.aio
import pytest
from fake import NOT_APPLIED, REFUSED, message, refusal, serving

import wald
from wald import tokens

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
BAD = refusal(UNAUTHENTICATED, "BAD_CREDENTIAL", REFUSED)
EXPIRED = refusal(UNAUTHENTICATED, "CREDENTIAL_EXPIRED", NOT_APPLIED)
REASONS = [(BAD, wald.BadCredential), (EXPIRED, wald.CredentialExpired)]


class Door(grpc.aio.ServerInterceptor):
    """Takes one token, and answers others with a refusal."""

    def __init__(self, token, refusal):
        self.token = token
        self.refusal = refusal
        self.seen = []

    async def check(self, metadata, context):
        given = [value for key, value in metadata if key == "authorization"]
        self.seen.append(given)
        if given != [f"Bearer {self.token}"]:
            await context.abort(*self.refusal)

    async def intercept_service(self, continuation, details):
        handler = await continuation(details)
        metadata = details.invocation_metadata
        if handler.unary_unary:

            async def unary(request, context):
                await self.check(metadata, context)
                return await handler.unary_unary(request, context)

            return handler._replace(unary_unary=unary)

        def stream(inner):
            async def guarded(request, context):
                await self.check(metadata, context)
                async for answer in inner(request, context):
                    yield answer

            return guarded

        if handler.stream_stream:
            return handler._replace(stream_stream=stream(handler.stream_stream))
        return handler._replace(unary_stream=stream(handler.unary_stream))


async def test_every_call_carries_the_token_and_the_metadata():
    door = Door("first", BAD)
    async with serving(interceptors=[door], token=" first\n", metadata=[("x-team", "a")]) as (_, client):
        await client.append("log", "x")
        async with client.session() as session:
            await (await session.send([wald.LogBatch("log", ["x"])]))
        async with client.producer("log") as producer:
            await producer.append("x")
        await client.wal.GetTail(wald.client.wal_pb2.GetTailRequest(log="log"))
    assert len(door.seen) == 7 and all(len(given) == 1 for given in door.seen)


@pytest.mark.parametrize(("reason", "kind"), REASONS)
async def test_refused_token_is_read_again_and_the_call_repeated(reason, kind, tmp_path):
    file = tmp_path / "token"
    file.write_text("first")
    door = Door("first", reason)
    async with serving(interceptors=[door], token_file=file) as (fake, client):
        await client.append("log", "x")
        door.token = "second"
        file.write_text("second\n")
        await fake.end_streams(client, reason)
        # A plain append: nothing was applied, so that it is repeated.
        await client.append("log", "x")
        assert len(door.seen) == 3 and len(fake.attempts) == 2


@pytest.mark.parametrize(("reason", "kind"), REASONS)
async def test_refused_token_that_the_file_still_has_is_not_sent_again(reason, kind, tmp_path):
    file = tmp_path / "token"
    file.write_text("first")
    door = Door("second", reason)
    for settings in ({"token_file": file}, {"token": "first"}):
        door.seen.clear()
        async with serving(interceptors=[door], **settings) as (_, client):
            with pytest.raises(kind) as caught:
                await client.append("log", "x")
            assert len(door.seen) == 1 and "first" not in repr(caught.value)


async def test_producer_goes_on_across_an_expired_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("first")
    door = Door("first", EXPIRED)
    async with serving(interceptors=[door], token_file=file) as (fake, client):
        async with client.producer("log") as producer:
            await (await producer.append("0"))
            door.token = "second"
            # The session ends as the server ends it, and the file comes later.
            fake.script.append(EXPIRED)
            ack = await producer.append("1")
            while len(door.seen) < 5:
                await asyncio.sleep(0.001)
            assert not ack.done()
            file.write_text("second")
            assert (await ack).lsn == 1
    assert fake.data() == ["0", "1"]


async def test_follower_goes_on_across_an_expired_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("first")
    door = Door("first", EXPIRED)
    async with serving(interceptors=[door], token_file=file) as (fake, client):
        async with client.follow("log") as follower:
            fake.messages.put_nowait(message(b"1", (0, ["a"])))
            assert (await anext(follower)).cursor == b"1"
            door.token = "second"
            file.write_text("second")
            fake.messages.put_nowait(EXPIRED)
            fake.messages.put_nowait(message(b"2", (1, ["b"])))
            assert (await anext(follower)).cursor == b"2"
            assert fake.scans[-1].cursor == b"1"


async def test_producer_with_a_fixed_token_ends_when_it_expires():
    door = Door("second", EXPIRED)
    async with serving(interceptors=[door], token="first") as (_, client):
        with pytest.raises(wald.CredentialExpired):
            async with client.producer("log", id="p", epoch=0, log_id=42) as producer:
                await producer.append("x")
    assert len(door.seen) == 1


@pytest.mark.parametrize(
    "endpoint", ["wald.internal", "http://10.0.0.1", "dns:///wald", "0.0.0.0", "127.0.0.1.nip.io", "ipv4:10.0.0.1:1"]
)
def test_token_does_not_cross_plaintext_to_another_machine(endpoint):
    with pytest.raises(wald.TokenError, match="plaintext") as caught:
        wald.Client(endpoint, token="k7Qp2mXa")
    assert "k7Qp" not in str(caught.value)
    wald.Client(endpoint, token="k7Qp2mXa", allow_insecure_token=True)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1", "localhost", "[::1]", "http://127.1.2.3:80", "unix:/x", "ipv6:[::1]:1", "https://wald.internal"]
)
def test_token_goes_to_loopback_and_through_tls(endpoint):
    client = wald.Client(endpoint, token="k7Qp2mXa")
    for text in (repr(client), str(vars(client)), repr(client._token), str(client._token)):
        assert "k7Qp" not in text


def test_token_that_cannot_be_used_is_named(tmp_path):
    for text, words in [
        ("", "is empty"),
        (" \n", "is empty"),
        ("k7Qp\n2mXa", "characters"),
        ("k7Qpé", "characters"),
        ("a" * 20_000, "larger than"),
    ]:
        file = tmp_path / "token"
        file.write_text(text)
        with pytest.raises(wald.TokenError, match=words) as caught:
            wald.Client(token_file=file)
        assert str(file) in str(caught.value) and "k7Qp" not in str(caught.value)
    with pytest.raises(wald.TokenError, match="No such file"):
        wald.Client(token_file=tmp_path / "missing")
    with pytest.raises(wald.TokenError, match="exclude"):
        wald.Client(token="a", token_file=file)


def test_file_is_read_at_most_once_a_second(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(tokens.time, "monotonic", lambda: now)
    file = tmp_path / "token"
    file.write_text("first")
    source = tokens.TokenSource(None, str(file))
    file.write_text("second")
    assert source.current() == "first"
    now += 1
    assert source.current() == "second"
    file.write_text("")
    now += 1
    assert source.current() == "second"


async def test_environment_names_the_server_and_the_token(tmp_path, monkeypatch):
    for name in ("ENDPOINT", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME", "TOKEN_FILE", "TOKEN"):
        monkeypatch.setenv(f"WALD_{name}", "")
    assert wald.Client.from_env().endpoint == wald.DEFAULT_ENDPOINT
    door = Door("first", BAD)
    async with serving(interceptors=[door]) as (_, other):
        monkeypatch.setenv("WALD_ENDPOINT", f"http://{other.endpoint}")
        monkeypatch.setenv("WALD_TOKEN", "first")
        async with wald.Client.from_env() as client:
            await client.append("log", "x")
        file = tmp_path / "token"
        file.write_text("second")
        monkeypatch.setenv("WALD_TOKEN_FILE", str(file))
        async with wald.Client.from_env() as client:
            with pytest.raises(wald.BadCredential):
                await client.append("log", "x")
        async with wald.Client.from_env(token="first", timeout=5) as client:
            await client.append("log", "x")
    monkeypatch.setenv("WALD_TLS_CA", "/missing")
    monkeypatch.setenv("WALD_ENDPOINT", "https://localhost")
    with pytest.raises(wald.TlsError, match="/missing"):
        wald.Client.from_env()


def counting(methods):
    """Interceptors that note the methods of all calls; gRPC takes one kind from each object."""

    class Unary(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            methods.append(details.method)
            return await continuation(details, request)

    class Streams(grpc.aio.StreamStreamClientInterceptor):
        async def intercept_stream_stream(self, continuation, details, requests):
            methods.append(details.method)
            return await continuation(details, requests)

    class Answers(grpc.aio.UnaryStreamClientInterceptor):
        async def intercept_unary_stream(self, continuation, details, request):
            methods.append(details.method)
            return await continuation(details, request)

    return [Unary(), Streams(), Answers()]


async def use(client, fake):
    await client.append("log", "x")
    async with client.session() as session:
        await (await session.send([wald.LogBatch("log", ["x"])]))
    fake.messages.put_nowait(message(b"1", (0, ["a"])))
    async with client.follow("log") as follower:
        assert (await anext(follower)).cursor == b"1"
    fake.script.append(refusal(grpc.StatusCode.NOT_FOUND, "LOG_NOT_FOUND", REFUSED))
    with pytest.raises(wald.LogNotFound):
        async with client.session() as session:
            await (await session.send([wald.LogBatch("log", ["x"])]))


async def test_interceptors_and_a_channel_of_ones_own_see_every_call():
    methods = []
    async with serving(client_interceptors=counting(methods)) as (fake, client):
        await use(client, fake)
        seen = list(methods)
        assert len(seen) == 4
        async with grpc.aio.insecure_channel(client.endpoint, interceptors=counting(methods)) as channel:
            async with wald.Client(channel=channel) as own:
                await use(own, fake)
            assert methods == seen * 2
            # Closing the client does not close it.
            async with wald.Client(channel=channel) as own:
                await own.append("log", "x")
            with pytest.raises(wald.TokenError, match="not known"):
                wald.Client(channel=channel, token="k7Qp")
            with pytest.raises(ValueError, match="excludes"):
                wald.Client(channel=channel, tls_ca="ca.pem")
