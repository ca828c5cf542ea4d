"""Errors: the outcome for the data, the reason, and whether a repeat is safe.

An answer of Wald carries ErrorInfo, and its facts are believed. A status without it comes
from the transport or a proxy, and does not report the server's work.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from wald.v1 import errors_pb2

if TYPE_CHECKING:
    from wald.records import Gap

DOMAIN = "wald.dev"

# Messages of the transport for a call that never got a connection, so that nothing was sent.
# A connection counts as made once the server's SETTINGS have arrived; no call is sent before.
_NO_CONNECTION = (
    "failed to connect to all addresses",
    "errors resolving ",
    "DNS resolution failed",
    "empty address list",
    "Domain name not found",
)
# Codes other than UNAVAILABLE under which the transport reports a stream that broke.
_BROKEN_STREAM = ("Stream removed", "RST_STREAM", "Socket closed", "Connection reset")


def spelled(reason: errors_pb2.Reason) -> str:
    """A reason of the contract, as ErrorInfo spells it."""
    return errors_pb2.Reason.Name(reason).removeprefix("REASON_")


class Outcome(Enum):
    """Outcome of a write that failed."""

    NOT_APPLIED = "NOT_APPLIED"
    """Nothing was written, and nothing will be."""
    UNKNOWN = "UNKNOWN"
    """It may or may not have been applied."""


class Retry(Enum):
    """Whether the same request may be sent again."""

    SAFE = "SAFE"
    """Yes; with backoff."""
    SAFE_WITH_CONDITION = "SAFE_WITH_CONDITION"
    """Only if it cannot be applied twice: with the same producer or expected lsn. Reads always may."""
    NEVER = "NEVER"
    """It would fail again."""


@dataclass(frozen=True)
class FailedCheck:
    """One condition that did not hold."""

    reason: str
    """Which: POSITION_MISMATCH, LOG_MISSING, LOG_EXISTS, LOG_REPLACED."""
    log: str
    description: str
    """For people, with the actual value."""


class WaldError(Exception):
    """A call failed.

    The package has repeated it already, as far as that was safe and the deadline reached.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        outcome: Outcome = Outcome.UNKNOWN,
        retry: Retry = Retry.NEVER,
        facts: dict[str, str] | None = None,
        failed: tuple[FailedCheck, ...] = (),
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.code = code
        """The status code; of failures that never left this process, the one that fits."""
        self.reason = reason
        """The reason, as ErrorInfo spells it (`POSITION_MISMATCH`); empty if the server did not
        answer. `wald.v1.errors_pb2.Reason` has them all."""
        self.outcome = outcome
        """Outcome of a write. A read has nothing to apply: NOT_APPLIED."""
        self.retry = retry
        """Whether the same request may be sent again."""
        self.facts = facts or {}
        """Every fact that the server gave, by name."""
        self.failed = failed
        """Every condition that did not hold."""
        self.retry_after = retry_after
        """Seconds that the server asks to wait before the next attempt."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.reason else self.message

    def number(self, fact: str) -> int | None:
        """A fact that is a number, such as `first_lsn`; None if the server did not give it."""
        value = self.facts.get(fact, "")
        return int(value) if value.isdecimal() else None

    def after_unknown(self) -> WaldError:
        """This error, of a call that an earlier attempt may have carried out.

        A POSITION_MISMATCH after a lost connection can be the echo of one's own success.
        """
        if self.outcome is Outcome.UNKNOWN:
            return self
        # This attempt was not sent, but the call was.
        error = connection_lost(self.message) if isinstance(self, NotSent) else copy.copy(self)
        error.message += " (an earlier attempt of this call may have been applied)"
        error.outcome = Outcome.UNKNOWN
        if error.retry is Retry.SAFE:
            error.retry = Retry.SAFE_WITH_CONDITION
        return error

    def of_read(self) -> WaldError:
        """This error, for a call that writes nothing: after a passing failure it may be
        repeated unchanged."""
        error = copy.copy(self)
        error.outcome = Outcome.NOT_APPLIED
        if error.retry is Retry.SAFE_WITH_CONDITION:
            error.retry = Retry.SAFE
        return error


class NotSent(WaldError):
    """No connection could be made; nothing was sent."""


class TlsFailure(str, Enum):
    """Why there is no TLS connection."""

    SETTINGS = "SETTINGS"
    """A file or another setting of the client cannot be used."""
    UNKNOWN_CA = "UNKNOWN_CA"
    """The server's certificate is from a CA that the client does not trust."""
    WRONG_NAME = "WRONG_NAME"
    """The server's certificate is for other names."""
    EXPIRED = "EXPIRED"
    """The server's certificate is expired, or not valid yet."""
    CERTIFICATE = "CERTIFICATE"
    """The server's certificate is refused for another reason."""
    SERVER_WITHOUT_TLS = "SERVER_WITHOUT_TLS"
    """The endpoint begins with https://, and the server does not speak TLS."""
    SERVER_WITH_TLS = "SERVER_WITH_TLS"
    """The endpoint does not begin with https://, and the server speaks TLS."""
    CLIENT_CERTIFICATE_REQUIRED = "CLIENT_CERTIFICATE_REQUIRED"
    """The server requires a certificate of the client, which sent none."""
    CLIENT_CERTIFICATE_REFUSED = "CLIENT_CERTIFICATE_REFUSED"
    """The server refused the certificate of the client."""
    HANDSHAKE = "HANDSHAKE"
    """The handshake failed for another reason."""


class TlsError(WaldError):
    """There is no TLS connection, or the server wants one; nothing was sent. `failure` has the reason."""

    def __init__(self, message: str, failure: TlsFailure = TlsFailure.HANDSHAKE, **facts):
        super().__init__(message, **facts)
        self.failure = failure


class TokenError(WaldError):
    """The token cannot be used, or must not be sent over plaintext; nothing was sent."""


class ConnectionLost(WaldError):
    """The connection broke underway; a write may have been applied."""


class DeadlineExceeded(WaldError):
    """The deadline passed; a write may have been applied, or still be."""


class EarlierFailure(WaldError):
    """The error of a request that was not carried out, or may not have been, because an
    earlier request of the same session or producer failed. `__cause__` is that failure; code,
    reason, facts and failed are its."""

    @classmethod
    def of(cls, cause: WaldError, outcome: Outcome) -> EarlierFailure:
        error = cls(
            f"an earlier request failed: {cause.message}",
            code=cause.code,
            reason=cause.reason,
            outcome=outcome,
            retry=_retry_after(cause, outcome),
            facts=cause.facts,
            failed=cause.failed,
        )
        error.__cause__ = cause
        return error


def _retry_after(cause: WaldError, outcome: Outcome) -> Retry:
    """Whether a later request may be sent again: not if the cause of the first failure stays."""
    if cause.retry is Retry.NEVER:
        return Retry.NEVER
    return Retry.SAFE if outcome is Outcome.NOT_APPLIED else Retry.SAFE_WITH_CONDITION


class StateError(WaldError):
    """The state of a durable producer or follower cannot be read, is not its state, or cannot be kept; `__cause__` is
    the exception of the state, if it raised one. A batch whose state could not be kept was not sent, and may be sent by
    the next start of the program."""

    def __init__(self, message: str):
        super().__init__(message, code=grpc.StatusCode.INTERNAL)


class RecordsMissing(WaldError):
    """A durable follower has come upon records that are missing: `gap`. Its next step goes on behind them."""

    def __init__(self, gap: Gap):
        super().__init__(
            f"records are missing: {gap}", code=grpc.StatusCode.DATA_LOSS, outcome=Outcome.NOT_APPLIED
        )
        self.gap = gap
        """The missing records."""


class InvalidRequest(WaldError):
    """The request breaks a rule or a limit; nothing was written."""


class ConditionFailed(WaldError):
    """A condition did not hold; nothing was written, if `outcome` says so."""


class PositionMismatch(ConditionFailed):
    """The expected lsn is not where the log (or cursor) stands (fact `actual_lsn`)."""


class LogMissing(ConditionFailed):
    """The log had to exist."""


class LogExists(ConditionFailed):
    """The log had not to exist."""


class LogReplaced(ConditionFailed):
    """The log was deleted and created again."""


class Fenced(ConditionFailed):
    """A newer writer has taken over (fact `writer_epoch`)."""


class ProducerRefused(WaldError):
    """The producer's batch cannot be appended any more."""


class ProducerGap(ProducerRefused):
    """The producer left out a sequence number (fact `expected`)."""


class ProducerFenced(ProducerRefused):
    """A newer incarnation of the producer has taken over."""


class ProducerExpired(ProducerRefused):
    """The batch is too old to be recognised (fact `oldest`), or the producer was forgotten (fact
    `first_epoch`): nothing was appended now."""


class ProducerConflict(ProducerRefused):
    """The sequence number was used before, with other content."""


class NotFound(WaldError):
    """No such thing."""


class LogNotFound(NotFound):
    """No such log."""


class CursorNotFound(NotFound):
    """No such cursor."""


class ProducerNotFound(NotFound):
    """The log does not know the producer."""


class Trimmed(WaldError):
    """Below the first lsn kept (fact `first_lsn`)."""


class BeyondTail(WaldError):
    """Beyond the tail (fact `tail_lsn`)."""


class Quarantined(WaldError):
    """Damaged (facts `log`, `from_lsn`, `to_lsn`, exclusive: read on from there)."""


class Overloaded(WaldError):
    """A queue, rate or disk is full; nothing was written, if `outcome` says so."""


class Quota(Overloaded):
    """A bound of the log, the store or the caller is reached (facts `used`, `limit`, `setting`)."""


class Unavailable(WaldError):
    """The server is starting, draining, waits for a restart, or does not own the store (reason MOVED, facts `owner`
    and `term`); nothing was written, if `outcome` says so."""


class Unauthenticated(WaldError):
    """The server does not know the caller; nothing was written."""


class NoCredential(Unauthenticated):
    """The server requires a credential, and the call has none."""


class BadCredential(Unauthenticated):
    """The server does not know the credential."""


class CredentialExpired(Unauthenticated):
    """The credential was valid until `expire_time`."""


class NotAllowed(WaldError):
    """The caller lacks a right (fact `right`); nothing was written."""


_BY_REASON: dict[str, type[WaldError]] = {
    spelled(reason): kind
    for reason, kind in {
        errors_pb2.REASON_POSITION_MISMATCH: PositionMismatch,
        errors_pb2.REASON_LOG_MISSING: LogMissing,
        errors_pb2.REASON_LOG_EXISTS: LogExists,
        errors_pb2.REASON_LOG_REPLACED: LogReplaced,
        errors_pb2.REASON_FENCED: Fenced,
        errors_pb2.REASON_PRODUCER_GAP: ProducerGap,
        errors_pb2.REASON_PRODUCER_FENCED: ProducerFenced,
        errors_pb2.REASON_PRODUCER_EXPIRED: ProducerExpired,
        errors_pb2.REASON_PRODUCER_CONFLICT: ProducerConflict,
        errors_pb2.REASON_LOG_NOT_FOUND: LogNotFound,
        errors_pb2.REASON_CURSOR_NOT_FOUND: CursorNotFound,
        errors_pb2.REASON_PRODUCER_NOT_FOUND: ProducerNotFound,
        errors_pb2.REASON_QUOTA: Quota,
        errors_pb2.REASON_TRIMMED: Trimmed,
        errors_pb2.REASON_BEYOND_TAIL: BeyondTail,
        errors_pb2.REASON_QUARANTINED: Quarantined,
        errors_pb2.REASON_NO_CREDENTIAL: NoCredential,
        errors_pb2.REASON_BAD_CREDENTIAL: BadCredential,
        errors_pb2.REASON_CREDENTIAL_EXPIRED: CredentialExpired,
        errors_pb2.REASON_NOT_ALLOWED: NotAllowed,
    }.items()
}
_BY_CODE: dict[grpc.StatusCode, type[WaldError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def from_rpc(failure: grpc.aio.AioRpcError) -> WaldError:
    """Reads the error that the transport raises."""
    return from_status(failure.code(), failure.details() or "", failure.trailing_metadata())


def from_status(code: grpc.StatusCode, message: str, metadata) -> WaldError:
    """Reads a status with its trailing metadata (pairs)."""
    info, checks, delay = _details(metadata)
    if info is None:
        return _foreign(code, message)
    kind = _BY_REASON.get(info.reason) or _BY_CODE.get(code, WaldError)
    facts = dict(info.metadata)
    return kind(
        message,
        code=code,
        reason=info.reason,
        outcome=_outcome(code, facts.get("outcome")),
        retry=_retry(code, facts.get("retry")),
        facts=facts,
        failed=checks,
        retry_after=delay,
    )


def _outcome(code: grpc.StatusCode, fact: str | None) -> Outcome:
    # UNAVAILABLE from the server: its promise, also where the facts do not say.
    if fact == "NOT_APPLIED" or (fact is None and code is grpc.StatusCode.UNAVAILABLE):
        return Outcome.NOT_APPLIED
    return Outcome.UNKNOWN


def _retry(code: grpc.StatusCode, fact: str | None) -> Retry:
    if fact in ("SAFE", "SAFE_WITH_CONDITION"):
        return Retry(fact)
    # Errors of reads do not say; these two pass by themselves.
    if fact is None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return Retry.SAFE
    return Retry.NEVER


def _foreign(code: grpc.StatusCode, message: str) -> WaldError:
    """Reads a status without ErrorInfo of Wald's."""
    # The transport on the other side calls its timer's end CANCELLED.
    timed_out = code is grpc.StatusCode.CANCELLED and message == "Timeout expired"
    if timed_out or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        return DeadlineExceeded(message, code=code, retry=Retry.SAFE_WITH_CONDITION)
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith(_NO_CONNECTION):
        return NotSent(message, code=code, outcome=Outcome.NOT_APPLIED, retry=Retry.SAFE)
    if code is grpc.StatusCode.UNAVAILABLE or any(text in message for text in _BROKEN_STREAM):
        return connection_lost(message)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        # The method was not even found.
        return WaldError(message, code=code, outcome=Outcome.NOT_APPLIED)
    return WaldError(f"{code.name}: {message}", code=code)


def connection_lost(message: str) -> ConnectionLost:
    """A connection that broke underway."""
    return ConnectionLost(message, code=grpc.StatusCode.UNAVAILABLE, retry=Retry.SAFE_WITH_CONDITION)


def _details(metadata):
    """ErrorInfo of Wald's, failed checks and delay, as far as the status carries them."""
    info, checks, delay = None, (), None
    for key, value in metadata or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    found = error_details_pb2.ErrorInfo()
                    detail.Unpack(found)
                    info = found if found.domain == DOMAIN else info
                elif detail.Is(error_details_pb2.PreconditionFailure.DESCRIPTOR):
                    failure = error_details_pb2.PreconditionFailure()
                    detail.Unpack(failure)
                    checks = tuple(FailedCheck(v.type, v.subject, v.description) for v in failure.violations)
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    retry = error_details_pb2.RetryInfo()
                    detail.Unpack(retry)
                    delay = retry.retry_delay.ToTimedelta().total_seconds()
        except DecodeError:
            # Wald does not send this, so it is not Wald's.
            continue
    return info, checks, delay
