package dev.wald;

import java.io.Serializable;
import java.util.OptionalLong;

/** Records that a scan does not deliver, named exactly. */
public final class Gap implements Serializable {
  private static final long serialVersionUID = 1L;

  private final String log;
  private final long fromLsn;
  private final Long toLsn;
  private final GapReason reason;

  Gap(dev.wald.v1.Gap gap) {
    this.log = gap.getLog();
    this.fromLsn = gap.getFromLsn();
    this.toLsn = gap.hasToLsn() ? gap.getToLsn() : null;
    this.reason = GapReason.of(gap.getReason());
  }

  /** The log's name. */
  public String log() {
    return log;
  }

  /** The first missing lsn. */
  public long fromLsn() {
    return fromLsn;
  }

  /** The lsn after the last missing one. Empty: up to wherever the log ended. */
  public OptionalLong toLsn() {
    return toLsn == null ? OptionalLong.empty() : OptionalLong.of(toLsn);
  }

  /** The reason why the records are missing. */
  public GapReason reason() {
    return reason;
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof Gap gap && log.equals(gap.log) && fromLsn == gap.fromLsn && toLsn().equals(gap.toLsn()) && reason == gap.reason;
  }

  @Override
  public int hashCode() {
    return log.hashCode() * 31 + Long.hashCode(fromLsn);
  }

  @Override
  public String toString() {
    String to = toLsn == null ? "the end of the log" : "before " + Long.toUnsignedString(toLsn);
    return "records of log \"" + log + "\" are missing, from " + Long.toUnsignedString(fromLsn) + " to " + to + ": " + reason;
  }
}
