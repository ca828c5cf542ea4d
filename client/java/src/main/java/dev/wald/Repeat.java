package dev.wald;

/** The effect of a request that is applied twice. */
enum Repeat {
  /** None: reads, and writes that name the final state instead of a change. */
  HARMLESS,
  /** It cannot be applied twice, because a condition holds at most once. */
  GUARDED,
  /** Records twice, or the undoing of another client's change. */
  HARMFUL;

  /** Whether to send the request again after this failure. */
  boolean allows(Failure failure) {
    // A quota does not pass without a change: its reason is reported at once.
    if (failure.reason == Reason.QUOTA) {
      return false;
    }
    return switch (failure.retry) {
      case SAFE -> true;
      case SAFE_WITH_CONDITION -> this != HARMFUL;
      case NEVER -> false;
    };
  }
}
