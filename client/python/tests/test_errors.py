"""The meaning of a status, and the repeats that it permits."""

import pytest
from fake import NOT_APPLIED, REFUSED, UNKNOWN, refusal
from grpc import StatusCode

import wald
from wald.errors import Outcome, Retry, from_status
from wald.retry import Repeat


def read(status):
    return from_status(*status)


def test_status_of_wald_gives_class_reason_facts_and_delay():
    error = read(refusal(StatusCode.OUT_OF_RANGE, "TRIMMED", {"first_lsn": "12"}, delay_ms=30, message="gone"))
    assert type(error) is wald.Trimmed
    assert (error.code, error.reason) == (StatusCode.OUT_OF_RANGE, "TRIMMED")
    assert error.number("first_lsn") == 12
    assert error.number("tail_lsn") is None
    assert error.retry_after == pytest.approx(0.03)
    assert str(error) == "TRIMMED: gone"


def test_all_failed_checks_are_read():
    failed = [("POSITION_MISMATCH", "a", "expected 7"), ("LOG_MISSING", "b", "")]
    error = read(refusal(StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", REFUSED, failed=failed))
    assert isinstance(error, wald.PositionMismatch)
    assert isinstance(error, wald.ConditionFailed)
    assert [(check.reason, check.log, check.description) for check in error.failed] == failed


def test_reason_of_a_newer_server_is_kept():
    error = read(refusal(StatusCode.ABORTED, "MOON_PHASE", {}))
    assert (type(error), error.reason, error.outcome) == (wald.WaldError, "MOON_PHASE", Outcome.UNKNOWN)


def test_error_info_of_another_domain_is_not_believed():
    error = read(refusal(StatusCode.UNAVAILABLE, "STARTING", NOT_APPLIED, domain="mesh.example"))
    assert type(error) is wald.ConnectionLost
    assert (error.reason, error.outcome) == ("", Outcome.UNKNOWN)


def test_details_that_are_no_status_are_not_believed():
    error = from_status(StatusCode.UNAVAILABLE, "", [("grpc-status-details-bin", b"\xff\xff")])
    assert (type(error), error.outcome) == (wald.ConnectionLost, Outcome.UNKNOWN)


def test_earlier_unknown_outcome_stays_unknown():
    error = read(refusal(StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", REFUSED)).after_unknown()
    assert isinstance(error, wald.PositionMismatch)
    assert (error.outcome, error.retry) == (Outcome.UNKNOWN, Retry.NEVER)
    passing = read(refusal(StatusCode.UNAVAILABLE, "DRAINING", NOT_APPLIED)).after_unknown()
    assert (passing.outcome, passing.retry) == (Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)


@pytest.mark.parametrize(
    "status",
    [
        refusal(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", UNKNOWN),
        (StatusCode.DEADLINE_EXCEEDED, "", ()),
        (StatusCode.CANCELLED, "Timeout expired", ()),
    ],
)
def test_deadline_is_one_error_whoever_noticed_it(status):
    error = read(status)
    assert type(error) is wald.DeadlineExceeded
    assert (error.code, error.outcome) == (StatusCode.DEADLINE_EXCEEDED, Outcome.UNKNOWN)
    assert error.retry is Retry.SAFE_WITH_CONDITION


# Status; outcome; whether to repeat a harmless, guarded, harmful request.
TABLE = {
    "draining": (
        refusal(StatusCode.UNAVAILABLE, "DRAINING", NOT_APPLIED),
        (Outcome.NOT_APPLIED, True, True, True),
    ),
    "busy": (
        refusal(StatusCode.RESOURCE_EXHAUSTED, "BUSY", NOT_APPLIED, delay_ms=50),
        (Outcome.NOT_APPLIED, True, True, True),
    ),
    "read that cannot be served now": (
        refusal(StatusCode.UNAVAILABLE, "READ_FAILED", {}),
        (Outcome.NOT_APPLIED, True, True, True),
    ),
    "journal failed underway": (
        refusal(StatusCode.INTERNAL, "JOURNAL_FAILED", UNKNOWN),
        (Outcome.UNKNOWN, True, True, False),
    ),
    "condition failed": (
        refusal(StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", REFUSED),
        (Outcome.NOT_APPLIED, False, False, False),
    ),
    "no connection": (
        (StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: ...", ()),
        (Outcome.NOT_APPLIED, True, True, True),
    ),
    "no address": (
        (StatusCode.UNAVAILABLE, "errors resolving host:1: ...", ()),
        (Outcome.NOT_APPLIED, True, True, True),
    ),
    "connection lost": (
        (StatusCode.UNAVAILABLE, "Stream removed (Socket closed)", ()),
        (Outcome.UNKNOWN, True, True, False),
    ),
    "stream reset": (
        (StatusCode.INTERNAL, "Received RST_STREAM with error code 2", ()),
        (Outcome.UNKNOWN, True, True, False),
    ),
    "something in between": (
        (StatusCode.UNAVAILABLE, "no healthy upstream", ()),
        (Outcome.UNKNOWN, True, True, False),
    ),
    "deadline": (
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()),
        (Outcome.UNKNOWN, True, True, False),
    ),
    "no such method": (
        (StatusCode.UNIMPLEMENTED, "", ()),
        (Outcome.NOT_APPLIED, False, False, False),
    ),
    "foreign internal": (
        (StatusCode.INTERNAL, "oops", ()),
        (Outcome.UNKNOWN, False, False, False),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_failure_is_repeated_as_far_as_that_is_safe(name):
    status, expected = TABLE[name]
    error = read(status)
    allowed = [repeat.allows(error) for repeat in (Repeat.HARMLESS, Repeat.GUARDED, Repeat.HARMFUL)]
    assert (error.outcome, *allowed) == expected


def test_pause_doubles_has_jitter_and_heeds_the_server():
    policy = wald.RetryPolicy(first_pause=0.1, max_pause=1.0)
    error = wald.ConnectionLost("")
    for failures, full in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (500, 1.0)):
        pauses = [policy.pause(failures, error) for _ in range(50)]
        assert all(full / 2 <= pause <= full for pause in pauses)
        assert len(set(pauses)) > 1
    assert policy.pause(1, wald.Overloaded("", retry_after=3.0)) == 3.0


@pytest.mark.parametrize(
    "condition, guards",
    [
        (wald.Condition(), False),
        (wald.Condition(must_exist=True, writer_epoch=3, log_id=1), False),
        (wald.Condition(expected_lsn=0), True),
        (wald.Condition(must_not_exist=True), True),
        (wald.Condition(producer=wald.ProducerSequence("p", 0, 0)), True),
        (wald.CursorCommit("a", "c", 3), False),
        (wald.CursorCommit("a", "c", 3, expected_lsn=3), False),
        (wald.CursorCommit("a", "c", 3, expected_lsn=0), True),
    ],
)
def test_only_what_cannot_hold_twice_guards(condition, guards):
    assert condition.guards is guards
