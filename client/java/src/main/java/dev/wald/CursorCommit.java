package dev.wald;

/** A move of a cursor, which makes the cursor if there is none. Immutable. */
public final class CursorCommit {
  private final dev.wald.v1.CursorCommit proto;

  private CursorCommit(dev.wald.v1.CursorCommit proto) {
    this.proto = proto;
  }

  /**
   * Moves a cursor of a log to this lsn, the next one to read: everything below it is done. At most the log's tail
   * (BEYOND_TAIL).
   */
  public static CursorCommit of(String log, String cursor, long lsn) {
    return new CursorCommit(dev.wald.v1.CursorCommit.newBuilder().setLog(log).setCursor(cursor).setLsn(lsn).build());
  }

  /**
   * The cursor must be at this lsn now, or POSITION_MISMATCH; 0 also matches a cursor that does not exist yet. If the commit moves the
   * cursor elsewhere, a repeat cannot move it twice, so the client repeats automatically.
   */
  public CursorCommit expectLsn(long lsn) {
    return new CursorCommit(proto.toBuilder().setExpectedLsn(lsn).build());
  }

  /** The log must have this number, or LOG_REPLACED. */
  public CursorCommit logId(long id) {
    return new CursorCommit(proto.toBuilder().setLogId(id).build());
  }

  dev.wald.v1.CursorCommit proto() {
    return proto;
  }

  /** Whether a repeat cannot be applied a second time: the cursor is no longer where it must be. */
  boolean guards() {
    return guards(proto);
  }

  static boolean guards(dev.wald.v1.CursorCommit commit) {
    return commit.hasExpectedLsn() && commit.getExpectedLsn() != commit.getLsn();
  }
}
