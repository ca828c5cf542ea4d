package dev.wald;

import dev.wald.v1.AppendCondition;

/**
 * Conditions of an append. All that are set must hold; otherwise nothing is written. Immutable: each method returns other conditions.
 */
public final class Condition {
  /** No condition. */
  public static final Condition NONE = new Condition(AppendCondition.getDefaultInstance());

  private final AppendCondition proto;

  private Condition(AppendCondition proto) {
    this.proto = proto;
  }

  /**
   * The first record must get this lsn, or POSITION_MISMATCH. With it a repeat cannot append twice, so the client repeats
   * automatically.
   */
  public Condition expectLsn(long lsn) {
    return new Condition(proto.toBuilder().setExpectedLsn(lsn).build());
  }

  /** The log must exist, or LOG_MISSING. */
  public Condition mustExist() {
    return new Condition(proto.toBuilder().setMustExist(true).build());
  }

  /** The log must not exist, or LOG_EXISTS. */
  public Condition mustNotExist() {
    return new Condition(proto.toBuilder().setMustNotExist(true).build());
  }

  /** The log must have this writer epoch, or FENCED. */
  public Condition writerEpoch(long epoch) {
    return new Condition(proto.toBuilder().setWriterEpoch(epoch).build());
  }

  /** The batch has this number of this producer. A {@link Producer} numbers its batches automatically. */
  public Condition sequence(Sequence sequence) {
    return new Condition(proto.toBuilder()
        .setProducer(dev.wald.v1.Producer.newBuilder().setId(sequence.producerId()).setEpoch(sequence.epoch()).setSequence(sequence.number()))
        .build());
  }

  /** The log must have this number, or LOG_REPLACED. */
  public Condition logId(long id) {
    return new Condition(proto.toBuilder().setLogId(id).build());
  }

  AppendCondition proto() {
    return proto;
  }

  /** Whether a repeat cannot be applied a second time. */
  boolean guards() {
    return guards(proto);
  }

  static boolean guards(AppendCondition condition) {
    return condition.hasExpectedLsn() || condition.getMustNotExist() || condition.hasProducer();
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof Condition condition && proto.equals(condition.proto);
  }

  @Override
  public int hashCode() {
    return proto.hashCode();
  }

  @Override
  public String toString() {
    return "Condition[" + proto.toString().strip().replace("\n", " ") + "]";
  }
}
