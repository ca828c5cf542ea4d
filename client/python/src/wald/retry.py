"""Rules for repeating calls."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from wald.errors import Retry, WaldError, spelled
from wald.times import Seconds, to_seconds
from wald.v1.errors_pb2 import REASON_QUOTA

QUOTA = spelled(REASON_QUOTA)


class Repeat(Enum):
    """Effect of a request that is applied twice."""

    READ = "read"
    """Nothing: it writes nothing."""
    HARMLESS = "harmless"
    """None: the request names the final state, not a change."""
    GUARDED = "guarded"
    """It cannot be: a condition holds at most once."""
    HARMFUL = "harmful"
    """Records twice."""

    def allows(self, error: WaldError) -> bool:
        """Whether to send the request again after this error."""
        if error.reason == QUOTA:
            # A quota does not pass without a change: its reason is reported at once.
            return False
        if error.retry is Retry.SAFE_WITH_CONDITION:
            return self is not Repeat.HARMFUL
        return error.retry is Retry.SAFE


@dataclass(frozen=True)
class RetryPolicy:
    """Number and pace of repeats of a call, within its deadline. Pauses in seconds, or as timedeltas."""

    max_attempts: int = 16
    """Maximum attempts, the first included; 1 repeats nothing. An attempt at an owner that a server
    names counts, though no pause is before it. The pauses of 16 are longer
    than the default deadline, so that the deadline decides. A producer counts none, and
    follows its deadline. A follower that was open once retries without end."""
    first_pause: Seconds = 0.05
    """Before the first repetition; doubles each time, with jitter down to half of it."""
    max_pause: Seconds = 2.0
    """The longest. A pause that the server asks for is kept even if longer."""

    def pause(self, failures: int, error: WaldError) -> float:
        """The time to wait after the `failures`th failure in a row."""
        full = min(to_seconds(self.first_pause) * 2.0 ** min(failures - 1, 62), to_seconds(self.max_pause))
        return max(full * random.uniform(0.5, 1.0), error.retry_after or 0.0)
