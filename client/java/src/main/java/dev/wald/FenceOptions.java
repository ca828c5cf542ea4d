package dev.wald;

import java.util.OptionalLong;

/**
 * Settings of a fence. Immutable.
 *
 * @param writerEpoch the new writer epoch; empty: the current and one
 * @param logId the log must have this number, or LOG_REPLACED
 */
public record FenceOptions(OptionalLong writerEpoch, OptionalLong logId) {
  /** The current writer epoch and one, of any log of the name. */
  public static final FenceOptions DEFAULT = new FenceOptions(OptionalLong.empty(), OptionalLong.empty());

  /** The new writer epoch. It exceeds the current one by 1 to 2^32 (FENCED, EPOCH_JUMP). */
  public FenceOptions writerEpoch(long epoch) {
    return new FenceOptions(OptionalLong.of(epoch), logId);
  }

  /** The log must have this number, or LOG_REPLACED. */
  public FenceOptions logId(long id) {
    return new FenceOptions(writerEpoch, OptionalLong.of(id));
  }

  /** The effect of a repeat. */
  Repeat repeat() {
    if (writerEpoch.isPresent()) {
      // The second time the epoch no longer exceeds the current one.
      return Repeat.GUARDED;
    }
    // A repeat raises the epoch twice; the caller still holds the newest. But without its number, it could shut out the writer of a log
    // that was created later under the name.
    return logId.isPresent() ? Repeat.HARMLESS : Repeat.HARMFUL;
  }
}
