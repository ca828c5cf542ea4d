package dev.wald;

/** Whether the same request may be sent again. The client has done so already, as far as its policy and the deadline go. */
public enum Retry {
  /** Yes, after a pause. */
  SAFE,
  /** Only if it cannot be applied twice, with the same expected lsn or producer. Reads always may. */
  SAFE_WITH_CONDITION,
  /** It would fail again. */
  NEVER
}
