package dev.wald;

/** Whether a write that failed was applied. */
public enum Outcome {
  /** Nothing was written, and nothing will be. */
  NOT_APPLIED,
  /** It may or may not have been applied, or may still be. */
  UNKNOWN
}
