package dev.wald;

/**
 * Settings of one append. Immutable.
 *
 * @param condition the conditions; all must hold
 * @param durability the durability that the records must reach before the answer; {@link Durability#UNSPECIFIED}: as the log's sync
 *     mode says
 */
public record AppendOptions(Condition condition, Durability durability) {
  /** No condition, and the durability of the log's sync mode. */
  public static final AppendOptions DEFAULT = new AppendOptions(Condition.NONE, Durability.UNSPECIFIED);

  /** Replaces all conditions. */
  public AppendOptions condition(Condition condition) {
    return new AppendOptions(condition, durability);
  }

  /**
   * The first record must get this lsn, or POSITION_MISMATCH. With it a repeat cannot append twice, so the client repeats
   * automatically.
   */
  public AppendOptions expectLsn(long lsn) {
    return condition(condition.expectLsn(lsn));
  }

  /** The log must have this writer epoch, or FENCED. */
  public AppendOptions writerEpoch(long epoch) {
    return condition(condition.writerEpoch(epoch));
  }

  /** The durability that the records must reach before the answer. */
  public AppendOptions durability(Durability durability) {
    return new AppendOptions(condition, durability);
  }
}
