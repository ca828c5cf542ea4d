"""The token of a client, and a channel whose calls carry it."""

from __future__ import annotations

import ipaddress
import time

import grpc
import grpc.aio

from wald.errors import Outcome, Retry, TokenError
from wald.tls import read_small

_MAX_BYTES = 16 << 10
# Minimum seconds between two reads of the file.
_READ_PAUSE = 1.0


def bad_token(detail: str) -> TokenError:
    return TokenError(
        detail, code=grpc.StatusCode.INVALID_ARGUMENT, outcome=Outcome.NOT_APPLIED, retry=Retry.NEVER
    )


class TokenSource:
    """A fixed token, or that of a file, which is read again at most once a second."""

    # The token is inside a function, so that no representation shows it.
    __slots__ = ("_path", "_secret", "_read")

    def __init__(self, token: str | None, path: str | None):
        if token is not None and path is not None:
            raise bad_token("token and token_file exclude each other")
        self._path = path
        if path is None:
            text = _clean(token, "the token")
        else:
            text = _read(path)
        self._secret = lambda: text
        self._read = time.monotonic()

    def __repr__(self) -> str:
        return "TokenSource(...)" if self._path is None else f"TokenSource({self._path!r})"

    @property
    def follows_a_file(self) -> bool:
        return self._path is not None

    def current(self) -> str:
        """The token of the next call."""
        if self._path is not None and time.monotonic() - self._read >= _READ_PAUSE:
            self._read_again()
        return self._secret()

    def changed(self, refused: str) -> bool:
        """Whether there is another token than the refused one."""
        if self._path is not None and self._secret() == refused:
            self._read_again()
        return self._secret() != refused

    def _read_again(self) -> None:
        self._read = time.monotonic()
        try:
            text = _read(self._path)
        except TokenError:
            # It may be replaced now: the earlier one stays in force.
            return
        self._secret = lambda: text


def _read(path: str) -> str:
    return _clean(read_small(path, _MAX_BYTES, bad_token).decode("utf-8", "replace"), path)


def _clean(text: str, place: str) -> str:
    """The token without the white space around it. A header has only visible ASCII."""
    token = text.strip()
    if not token:
        raise bad_token(f"{place} is empty, and must have a token")
    if any(not "!" <= character <= "~" for character in token):
        raise bad_token(f"{place} has characters that a token cannot have, such as white space inside")
    return token


def is_loopback(target: str) -> bool:
    """Whether a target of gRPC stays on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Carrying:
    """A method of a stub whose calls carry more metadata."""

    def __init__(self, method, metadata):
        self._method = method
        self._metadata = metadata

    def __call__(self, *arguments, metadata=None, **named):
        return self._method(*arguments, metadata=self._metadata(metadata), **named)


class CarryingChannel(grpc.aio.Channel):
    """A channel whose calls carry the token and further metadata. Not an interceptor, whose streams are other objects
    than gRPC's own."""

    def __init__(self, inner: grpc.aio.Channel, token: TokenSource | None, metadata):
        self._inner = inner
        self._token = token
        self._more = tuple(metadata)

    def _metadata(self, given) -> grpc.aio.Metadata:
        pairs = [*self._more, *(given or ())]
        if self._token is not None:
            pairs.append(("authorization", f"Bearer {self._token.current()}"))
        return grpc.aio.Metadata(*pairs)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def close(self, grace=None):
        await self._inner.close(grace)

    def get_state(self, try_to_connect=False):
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state):
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self):
        await self._inner.channel_ready()

    def unary_unary(self, *arguments, **named):
        return _Carrying(self._inner.unary_unary(*arguments, **named), self._metadata)

    def unary_stream(self, *arguments, **named):
        return _Carrying(self._inner.unary_stream(*arguments, **named), self._metadata)

    def stream_unary(self, *arguments, **named):
        return _Carrying(self._inner.stream_unary(*arguments, **named), self._metadata)

    def stream_stream(self, *arguments, **named):
        return _Carrying(self._inner.stream_stream(*arguments, **named), self._metadata)
