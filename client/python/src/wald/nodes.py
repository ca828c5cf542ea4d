"""The servers of a client: the current one, and the channels to them.

```text
 list:  a ──▶ b ──▶ c     no connection, a server that starts or stops, MOVED without owner
        ▲           │
        └───────────┘     MOVED with an owner, or an answer of the owner through another server and a connection
                          to the owner: to the owner, in the list or not
```

A failure moves the client only if it is one of the current server: a late failure of a server that
the client has left changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from wald.errors import ConnectionLost, NotSent, TlsError, TokenError, WaldError, spelled
from wald.tls import TLS_PAUSE
from wald.v1 import errors_pb2

DEFAULT_ENDPOINT = "127.0.0.1:6925"
# Port of an endpoint that names none.
_DEFAULT_PORT = 6925
# Targets of gRPC that are not HOST:PORT.
_OTHER_TARGETS = ("unix:", "dns:", "ipv4:", "ipv6:")
# The owner of the store, in the metadata of an answer that came through another server.
_OWNER_KEY = "wald-owner"
# Seconds between two attempts to reach such an owner, if the first one fails.
_APPROACH_PAUSE = 60.0
# Maximum seconds that the streams of a channel continue after the client has given it up.
_OLD_CHANNEL_SECONDS = 60.0

_MOVED = spelled(errors_pb2.REASON_MOVED)
# Reasons for which the next attempt goes to another server of the list. A server that has lost its bucket may have lost
# the store with it.
_ELSEWHERE = (
    _MOVED,
    spelled(errors_pb2.REASON_STARTING),
    spelled(errors_pb2.REASON_DRAINING),
    spelled(errors_pb2.REASON_BUCKET_DOWN),
)


class Connection:
    """The channel to one server, and the stubs on it."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel):
        self.endpoint = endpoint
        self.channel = channel
        self.appends_alone_until = 0.0
        """Until this time, by the clock of the event loop, appends are calls of their own."""
        self._stubs: dict[type, object] = {}

    def stub(self, kind):
        if kind not in self._stubs:
            self._stubs[kind] = kind(self.channel)
        return self._stubs[kind]


class Nodes:
    """The current server, and at most one channel to each server of the list and to one owner outside of it."""

    def __init__(self, listed: tuple[str, ...], connect: Callable[[str], grpc.aio.Channel]):
        self._listed = listed
        self._connect = connect
        self.current = listed[0]
        """The server of the next call, as HOST:PORT."""
        # The last owner that the list does not have.
        self._outside: str | None = None
        self._connections: dict[str, Connection] = {}
        # For each server its last failure of TLS, and the time until which no connection to it begins.
        self._pauses: dict[str, tuple[float, TlsError]] = {}
        self._closing: set[asyncio.Task] = set()
        # The attempt to reach an owner, and the time from which on the next one may begin.
        self._approaching: asyncio.Task | None = None
        self._next_approach = 0.0

    @property
    def several(self) -> bool:
        """The client has called more than one server, or may."""
        return len(self._listed) > 1 or self._outside is not None

    def open(self) -> Connection:
        """The connection to the current server. Raises its last TlsError while the next attempt must wait."""
        connection = self._connections.get(self.current)
        if connection is None:
            if self.current in self._pauses:
                until, failure = self._pauses[self.current]
                if asyncio.get_running_loop().time() < until:
                    raise failure
            connection = Connection(self.current, self._connect(self.current))
            self._connections[self.current] = connection
        return connection

    def uses(self, connection: Connection) -> bool:
        """The connection has not been given up."""
        return self._connections.get(connection.endpoint) is connection

    def pause(self, endpoint: str, failure: TlsError) -> None:
        """Begins no connection to this server for a while."""
        self._pauses[endpoint] = (asyncio.get_running_loop().time() + TLS_PAUSE, failure)

    def give_up(self, endpoint: str) -> None:
        """Makes the next call of this server begin a new channel. Streams on the old one have some time to end."""
        connection = self._connections.pop(endpoint, None)
        if connection is not None:
            closing = asyncio.ensure_future(connection.channel.close(_OLD_CHANNEL_SECONDS))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def give_up_all(self) -> None:
        for endpoint in list(self._connections):
            self.give_up(endpoint)

    async def close(self, grace: float | None) -> None:
        """Closes every channel. Calls underway have `grace` seconds to end."""
        if self._approaching is not None:
            self._approaching.cancel()
        await asyncio.gather(*(connection.channel.close(grace) for connection in self._connections.values()))
        for closing in self._closing:
            closing.cancel()
        approaching = [] if self._approaching is None else [self._approaching]
        await asyncio.gather(*self._closing, *approaching, return_exceptions=True)

    def failed(self, asked: str, error: WaldError, owner: str | None) -> None:
        """Chooses the server of the next attempt after this error of the server `asked`. `owner`: the one that a
        MOVED error names, if the client may call it."""
        if asked != self.current:
            return
        if owner is not None and owner != asked:
            self.current = owner
        elif isinstance(error, (NotSent, TlsError, ConnectionLost)) or error.reason in _ELSEWHERE:
            # From an owner outside of the list to the first of the list.
            place = self._listed.index(asked) + 1 if asked in self._listed else 0
            self.current = self._listed[place % len(self._listed)]
        self._keep_one_outside()

    def _keep_one_outside(self) -> None:
        """Gives up the channel to the last owner outside of the list, if the current server is another one."""
        if self.current not in (*self._listed, self._outside):
            if self._outside is not None:
                self.give_up(self._outside)
                self._pauses.pop(self._outside, None)
            self._outside = self.current

    def approach(self, through: str, metadata, owner_of: Callable[[str], str], seconds: float) -> None:
        """Takes note of the metadata of an answer. If it came from an owner that the server `through` only forwards to,
        later calls go to the owner itself, once there is a connection to it, within `seconds`. Until then they stay: the
        owner may be out of this client's reach, behind a balancer or a tunnel. `owner_of` reads the owner's address, and
        raises ValueError or TokenError if the client must not call it."""
        named = next((value for key, value in metadata or () if key == _OWNER_KEY), None)
        now = asyncio.get_running_loop().time()
        if named is None or through != self.current or now < self._next_approach:
            return
        self._next_approach = now + _APPROACH_PAUSE
        try:
            owner = owner_of(named)
        except (ValueError, TokenError):
            return
        if owner != through:
            self._approaching = asyncio.ensure_future(self._reach(through, owner, seconds))

    async def _reach(self, through: str, owner: str, seconds: float) -> None:
        """Makes the owner the current server once there is a connection to it."""
        # A new channel: an earlier one to it may wait for its next attempt.
        connection = Connection(owner, self._connect(owner))
        goes = False
        try:
            await asyncio.wait_for(connection.channel.channel_ready(), seconds)
            self._next_approach = 0.0
            goes = through == self.current
        except asyncio.TimeoutError:
            pass
        finally:
            if not goes:
                await connection.channel.close()
        if not goes:
            return
        self.give_up(owner)
        self._connections[owner] = connection
        self.current = owner
        self._keep_one_outside()

    def follows(self, asked: str, error: WaldError) -> bool:
        """Whether the current server is the owner that this error of another server names."""
        return error.reason == _MOVED and asked != self.current == error.facts.get("owner")


def owner_of(error: WaldError) -> str | None:
    """The server that a MOVED error names, as HOST:PORT; None if it names none. Raises ValueError for another text."""
    named = error.facts.get("owner", "") if error.reason == _MOVED else ""
    return owner_at(named) if named else None


def owner_at(named: str) -> str:
    """The address of an owner, as HOST:PORT. Raises ValueError for another text."""
    if "@" in named or named.startswith(_OTHER_TARGETS):
        raise ValueError(f"`{named}` is not HOST:PORT")
    return _host_port(named, f"`{named}` is not HOST:PORT")


def endpoints(text: str) -> tuple[tuple[str, ...], bool]:
    """The endpoints of a list with commas, each as `HOST:PORT`, and whether they ask for TLS."""
    if "@" in text:
        # A password can have a comma, and no error may show a part of it.
        raise ValueError(f"an endpoint has no user name; give one such as {DEFAULT_ENDPOINT}")
    parts = text.split(",")
    found = []
    secure = False
    for number, part in enumerate(parts, 1):
        if not part and len(parts) > 1:
            raise ValueError(f"`{text}` is not a list of endpoints such as {DEFAULT_ENDPOINT}: its part {number} is empty")
        target, part_secure = _complete(part)
        if number > 1 and part_secure != secure:
            raise ValueError(
                f"`{part}` is not an endpoint such as {DEFAULT_ENDPOINT} in this list: either every part begins with "
                "https://, or none does"
            )
        secure = part_secure
        found.append(target)
    return tuple(dict.fromkeys(found)), secure


def _complete(endpoint: str) -> tuple[str, bool]:
    """The endpoint as `HOST:PORT`, and whether it asks for TLS. The transport would take port 443 for one
    without a port."""
    secure = endpoint.startswith("https://")
    target = endpoint.removeprefix("https://" if secure else "http://").rstrip("/")
    if target.startswith(_OTHER_TARGETS):
        return target, secure
    return _host_port(target, f"`{endpoint}` is not an endpoint such as {DEFAULT_ENDPOINT}"), secure


def _host_port(target: str, wrong: str) -> str:
    """`HOST:PORT`, with the default port if there is none. Raises ValueError, which begins with `wrong`."""
    host, colon, port = target.rpartition(":")
    if not colon or (target.startswith("[") and target.endswith("]")):
        host, port = target, str(_DEFAULT_PORT)
    if not host or "/" in host or any(character.isspace() for character in host):
        raise ValueError(wrong)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{wrong}: its port is not a number from 1 to 65535")
    return f"{host}:{port}"
