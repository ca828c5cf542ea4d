"""TLS: who is refused, with which sentence, and files that are replaced."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time

import grpc
import grpc.aio
import pytest
from authority import Authority
from fake import DRAINING, moved, no_server, running, serving

import wald
from wald import Outcome, Retry, TlsFailure

ONCE = wald.RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("good") / "good")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other") / "other")


def secured(authority, *, clients=False, **more):
    """The settings of a fake with TLS."""
    pem, key = authority.issue("server", **more)
    with open(pem, "rb") as certificate, open(key, "rb") as secret:
        pair = [(secret.read(), certificate.read())]
    roots = authority.pem.read_bytes() if clients else None
    return grpc.ssl_server_credentials(pair, roots, clients)


@contextlib.asynccontextmanager
async def client_of(endpoint, **settings):
    async with wald.Client(endpoint, **{"retry": ONCE, **settings}) as client:
        yield client


async def refused(endpoint, failure, words, **settings):
    async with client_of(endpoint, **settings) as client:
        with pytest.raises(wald.TlsError, match=words) as caught:
            await client.append("log", "x")
        error = caught.value
        assert (error.failure, error.outcome, error.retry) == (failure, Outcome.NOT_APPLIED, Retry.SAFE)
        assert client.tls_failure.failure is failure
        # Too early for another attempt.
        with pytest.raises(wald.TlsError):
            await client.tail("log")


async def test_server_of_the_given_ca_is_trusted(authority):
    async with serving(secured(authority), tls_ca=authority.pem) as (_, client):
        assert (await client.append("log", "x")).lsn == 1
        assert client.tls_failure is None
        async with client.session() as session:
            await (await session.send([wald.LogBatch("log", ["x"])]))


async def test_server_of_an_unknown_ca_is_refused(authority, other):
    async with serving(secured(authority), tls_ca=authority.pem) as (fake, client):
        for ca in (other.pem, None):
            await refused(f"https://{client.endpoint}", TlsFailure.UNKNOWN_CA, "trusted CA", tls_ca=ca)
        assert not fake.attempts


async def test_server_of_another_name_is_refused(authority):
    async with serving(secured(authority), tls_ca=authority.pem) as (_, client):
        url = f"https://{client.endpoint}"
        await refused(url, TlsFailure.WRONG_NAME, "not for wald.internal", tls_ca=authority.pem, server_name="wald.internal")
        async with client_of(url, tls_ca=authority.pem, server_name="localhost") as named:
            await named.append("log", "x")


async def test_certificate_of_an_owner_must_name_its_host(authority):
    twice = wald.RetryPolicy(max_attempts=2)
    async with serving(secured(authority), tls_ca=authority.pem) as (other, client):
        async with running(secured(authority, names="DNS:localhost")) as (owner, port):
            url = f"https://{client.endpoint}"
            other.refuses = moved(f"localhost:{port}")
            async with client_of(url, tls_ca=authority.pem, retry=twice) as first:
                await first.append("log", "x")
            other.refuses = moved(f"127.0.0.1:{port}")
            async with client_of(url, tls_ca=authority.pem, retry=twice) as second:
                with pytest.raises(wald.TlsError, match="not for 127.0.0.1"):
                    await second.append("log", "x")
            assert len(owner.attempts) == 1
            async with client_of(url, tls_ca=authority.pem, server_name="localhost", retry=twice) as named:
                await named.append("log", "x")
            assert len(owner.attempts) == 2


async def test_server_without_tls_does_not_keep_a_client_from_the_next(authority):
    async with serving() as (_, plain), serving(secured(authority), tls_ca=authority.pem) as (_, client):
        url = f"https://{plain.endpoint},https://{client.endpoint}"
        async with client_of(url, tls_ca=authority.pem) as both:
            with pytest.raises(wald.TlsError):
                await both.append("log", "x")
            # The pause after a failure of TLS is for one server only.
            await both.append("log", "x")


async def test_replaced_files_count_for_the_channels_to_all_servers(authority, other, tmp_path, monkeypatch):
    monkeypatch.setattr("wald.tls._READ_PAUSE", 0.0)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.pem.read_bytes())
    async with running(secured(authority)) as (fake, port):
        with no_server() as dead:
            url = f"https://127.0.0.1:{port},https://{dead}"
            async with client_of(url, tls_ca=ca, retry=wald.RetryPolicy(first_pause=0.001)) as client:
                await client.append("log", "x")
                old = client.channel
                ca.write_bytes(authority.pem.read_bytes() + other.pem.read_bytes())
                fake.script.append(DRAINING)
                await client.append("log", "x")
                assert client.endpoint.endswith(f":{port}") and client.channel is not old


async def test_expired_server_is_refused(authority):
    async with serving(secured(authority, expired=True), tls_ca=authority.pem) as (_, client):
        await refused(f"https://{client.endpoint}", TlsFailure.EXPIRED, "expired", tls_ca=authority.pem)


async def test_plaintext_server_is_named(authority):
    async with serving() as (_, client):
        await refused(f"https://{client.endpoint}", TlsFailure.SERVER_WITHOUT_TLS, "http://", tls_ca=authority.pem)


@contextlib.contextmanager
def listening(answer):
    """A port whose connections `answer` gets; yields its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_tls_server_is_named_to_a_plaintext_client():
    def answer(peer):
        peer.recv(1000)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\nuse https://")

    with listening(answer) as endpoint:
        await refused(endpoint, TlsFailure.SERVER_WITH_TLS, "https://")


async def test_refusal_of_the_client_certificate_is_named(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    context.load_verify_locations(authority.pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    def shake_hands(peer):
        with context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False) as secured:
            with contextlib.suppress(ssl.SSLError):
                secured.do_handshake()
            # Until the client has read the alert: closing with unread bytes would take it away.
            while socket.socket.recv(secured, 1000):
                pass

    with listening(shake_hands) as endpoint:
        url = f"https://{endpoint}"
        await refused(url, TlsFailure.CLIENT_CERTIFICATE_REQUIRED, "requires", tls_ca=authority.pem)
        pem, key = authority.issue("expired", expired=True)
        identity = {"tls_ca": authority.pem, "tls_cert": pem, "tls_key": key}
        await refused(url, TlsFailure.CLIENT_CERTIFICATE_REFUSED, "refused", **identity)


async def test_replaced_client_certificate_is_used_once_a_connection_failed(authority):
    pem, key = authority.issue("client", expired=True)
    async with serving(secured(authority, clients=True), tls_ca=authority.pem) as (_, client):
        url = f"https://{client.endpoint}"
        async with client_of(url, tls_ca=authority.pem, tls_cert=pem, tls_key=key) as client:
            with pytest.raises(wald.WaldError):
                await client.append("log", "x")
            authority.issue("client")
            client.retry = wald.RetryPolicy()
            await client.append("log", "x")
            assert client.tls_failure is None


async def test_all_calls_together_make_one_attempt_a_second(authority):
    connections = []

    def answer(peer):
        connections.append(time.monotonic())
        peer.recv(1000)
        # A frame of HTTP/2, not a record of TLS.
        peer.sendall(b"\0\0\0\4\0\0\0\0\0")

    with listening(answer) as endpoint:
        settings = {"tls_ca": authority.pem, "retry": wald.RetryPolicy(), "timeout": 2.5}
        async with client_of(f"https://{endpoint}", **settings) as client:
            calls = [client.append("log", "x") for _ in range(20)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, wald.TlsError) and error.failure is TlsFailure.SERVER_WITHOUT_TLS
    # On a busy machine gRPC makes some attempts twice. Without pauses 20 calls would make hundreds.
    assert 2 <= len(connections) <= 6, connections


async def test_session_producer_and_scan_report_the_failure(authority, other):
    async with serving(secured(authority), tls_ca=authority.pem) as (_, client):
        async with client_of(f"https://{client.endpoint}", tls_ca=other.pem, timeout=0.1) as wrong:
            with pytest.raises(wald.TlsError):
                async with wrong.session() as session:
                    await (await session.send([wald.LogBatch("log", ["x"])]))
            with pytest.raises(wald.TlsError):
                async with wrong.producer("log", retry_for=0.1) as producer:
                    await producer.append("x")
            with pytest.raises(wald.TlsError):
                async for _ in wrong.scan("log"):
                    pass


def test_files_that_cannot_be_used_are_named(authority, tmp_path):
    pem, key = authority.issue("client")
    _, foreign = authority.issue("foreign")
    empty = tmp_path / "empty"
    empty.write_text("")
    for settings, words in [
        ({"tls_ca": tmp_path / "missing"}, "missing: No such file"),
        ({"tls_ca": empty}, "empty: no certificate"),
        ({"tls_cert": pem, "tls_key": foreign}, "is not the key of"),
        ({"tls_cert": pem, "tls_key": empty}, "empty: no private key"),
        ({"tls_cert": empty, "tls_key": key}, "empty: no certificate"),
        ({"tls_cert": pem}, "needs both"),
    ]:
        with pytest.raises(wald.TlsError, match=words) as caught:
            wald.Client("https://localhost", **settings)
        assert (caught.value.failure, caught.value.retry) == (TlsFailure.SETTINGS, Retry.NEVER)
    with pytest.raises(ValueError, match="must begin with https://"):
        wald.Client("localhost", tls_ca=authority.pem)
