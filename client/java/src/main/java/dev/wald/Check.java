package dev.wald;

import dev.wald.v1.LogCheck;

/** A condition on a log that a batch does not write. All that is set must hold. Immutable. */
public final class Check {
  private final LogCheck proto;

  private Check(LogCheck proto) {
    this.proto = proto;
  }

  /** A check of this log, without a condition yet. */
  public static Check of(String log) {
    return new Check(LogCheck.newBuilder().setLog(log).build());
  }

  /** The log must have this tail, or POSITION_MISMATCH. */
  public Check expectLsn(long lsn) {
    return new Check(proto.toBuilder().setExpectedLsn(lsn).build());
  }

  /** The log must exist, or LOG_MISSING. */
  public Check mustExist() {
    return new Check(proto.toBuilder().setMustExist(true).build());
  }

  /** The log must not exist, or LOG_EXISTS. */
  public Check mustNotExist() {
    return new Check(proto.toBuilder().setMustNotExist(true).build());
  }

  /** The log must have this number, or LOG_REPLACED. */
  public Check logId(long id) {
    return new Check(proto.toBuilder().setLogId(id).build());
  }

  LogCheck proto() {
    return proto;
  }
}
