package dev.wald;

/** The pauses between the attempts of a call. For one thread. */
final class Pauses {
  private final RetryPolicy policy;
  /** Failures in a row. */
  private int failures;
  /** The last attempt began without a pause. */
  private boolean hurried;

  Pauses(RetryPolicy policy) {
    this.policy = policy;
  }

  /**
   * The pause after a failed attempt, in nanoseconds. There is none if the server named the owner of the store; but not twice in a row,
   * or two nodes that name each other would make the call spin.
   */
  long next(Failure failure, Attempt attempt) {
    failures++;
    hurried = attempt.named && !hurried;
    return hurried ? 0 : policy.pause(failures, failure);
  }

  /** Whether the last attempt of the policy has failed. */
  boolean exhausted() {
    return failures >= policy.maxAttempts();
  }

  /** An attempt was not in vain. */
  void progress() {
    failures = 0;
    hurried = false;
  }
}
