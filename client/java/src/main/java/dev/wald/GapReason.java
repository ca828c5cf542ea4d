package dev.wald;

/** Why records are missing from a scan. */
public enum GapReason {
  /** Forgotten by a trim, or below the records that the last trim forgot. */
  TRIMMED,
  /** Forgotten by the log's retention. */
  EXPIRED,
  /** Damaged on the disk and set aside. */
  QUARANTINED,
  /** Acked as less than durable, and gone after a restart. */
  LOST,
  /** The log was deleted; one that is created later under the name is another log. */
  DELETED,
  /** A newer server sent a reason that this package does not name. */
  OTHER;

  static GapReason of(dev.wald.v1.GapReason reason) {
    return switch (reason) {
      case GAP_REASON_TRIMMED -> TRIMMED;
      case GAP_REASON_EXPIRED -> EXPIRED;
      case GAP_REASON_QUARANTINED -> QUARANTINED;
      case GAP_REASON_LOST -> LOST;
      case GAP_REASON_DELETED -> DELETED;
      default -> OTHER;
    };
  }
}
