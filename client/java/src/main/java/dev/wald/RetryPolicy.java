package dev.wald;

import java.time.Duration;
import java.util.concurrent.ThreadLocalRandom;

/**
 * How often and how fast a call is repeated, within its deadline. Immutable.
 *
 * @param maxAttempts maximum number of attempts, the first included. 1 repeats nothing. A scan gives up as well when it has failed for
 *     as long as the client's timeout. A follower that was open once, and a producer, do not count.
 * @param firstPause the pause before the first repetition; it doubles each time, with jitter down to half of it
 * @param maxPause the longest pause. A pause that the server asks for is kept even if it is longer. An attempt at an owner that a node
 *     has just named comes without a pause, at most once between two pauses.
 */
public record RetryPolicy(int maxAttempts, Duration firstPause, Duration maxPause) {
  /** 16 attempts, whose pauses are longer than the default deadline, so that the deadline decides; from 50 ms to 2 s. */
  public static final RetryPolicy DEFAULT = new RetryPolicy(16, Duration.ofMillis(50), Duration.ofSeconds(2));

  /** Repeats nothing. */
  public static final RetryPolicy NONE = new RetryPolicy(1, Duration.ofMillis(50), Duration.ofSeconds(2));

  /** The policy of calls that repeat until their deadline. */
  RetryPolicy patient() {
    return new RetryPolicy(Integer.MAX_VALUE, firstPause, maxPause);
  }

  /** The time to wait after a number of failures in a row, in nanoseconds. */
  long pause(int failures, Failure failure) {
    long full = Times.nanos(maxPause);
    // Past 30 doublings of anything that matters, the bound is reached.
    if (failures - 1 < 30) {
      full = Math.min(full, Times.nanos(firstPause) << failures - 1);
    }
    long jittered = (long) (full * (0.5 + ThreadLocalRandom.current().nextDouble() / 2));
    return Math.max(jittered, Times.nanos(failure.retryAfter));
  }
}
