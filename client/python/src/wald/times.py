"""Times and spans of Python, and their exact forms: microseconds since the Unix epoch, and seconds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Union

from google.protobuf import duration_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

Seconds = Union[float, timedelta]
"""A span: seconds, or a timedelta."""


def to_microseconds(time: datetime) -> int:
    """The microseconds from the Unix epoch to a time, without rounding. Raises ValueError if the time has no time zone,
    TypeError if it is no datetime."""
    if not isinstance(time, datetime):
        raise TypeError(f"a time is a datetime, not {type(time).__name__}; timestamp_us takes microseconds")
    if time.utcoffset() is None:
        raise ValueError(f"the time {time.isoformat()} has no time zone: use datetime.now(timezone.utc), or set tzinfo")
    return (time - _EPOCH) // _MICROSECOND


def to_datetime(timestamp_us: int) -> datetime:
    """The time in UTC of these microseconds since the Unix epoch, without rounding. Raises OverflowError outside of the years
    1 to 9999."""
    return _EPOCH + timestamp_us * _MICROSECOND


def to_seconds(span: Seconds) -> float:
    """The seconds of a span."""
    return span.total_seconds() if isinstance(span, timedelta) else span


def to_duration(seconds: float) -> duration_pb2.Duration:
    """The contract's form of a span; protobuf before 5.28 takes no timedelta in a message."""
    span = duration_pb2.Duration()
    span.FromTimedelta(timedelta(seconds=seconds))
    return span


def start_us(timestamp_us: int | None, time: datetime | None) -> int | None:
    """The time at which a read begins, in microseconds; None: elsewhere. At most one of both may be given."""
    return timestamp_us if time is None else to_microseconds(time)
