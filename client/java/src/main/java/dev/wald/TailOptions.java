package dev.wald;

import java.util.OptionalLong;

/**
 * Settings of a question for the tail of a log. Immutable.
 *
 * @param logId the log must have this number, or LOG_REPLACED
 * @param visibility the records that count; {@link Visibility#UNSPECIFIED}: those that the log's sync mode acks
 * @param survivedSince the answer has the survivors of this recovery epoch
 */
public record TailOptions(OptionalLong logId, Visibility visibility, OptionalLong survivedSince) {
  /** Any log of the name, and the visibility of its sync mode. */
  public static final TailOptions DEFAULT = new TailOptions(OptionalLong.empty(), Visibility.UNSPECIFIED, OptionalLong.empty());

  /** The log must have this number, or LOG_REPLACED. */
  public TailOptions logId(long id) {
    return new TailOptions(OptionalLong.of(id), visibility, survivedSince);
  }

  /** The records that count. */
  public TailOptions visibility(Visibility visibility) {
    return new TailOptions(logId, visibility, survivedSince);
  }

  /** The answer has the survivors of this recovery epoch. */
  public TailOptions survivedSince(long recoveryEpoch) {
    return new TailOptions(logId, visibility, OptionalLong.of(recoveryEpoch));
  }
}
