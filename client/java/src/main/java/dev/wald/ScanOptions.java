package dev.wald;

import com.google.protobuf.ByteString;
import dev.wald.v1.ScanRequest;
import java.time.Instant;
import java.util.function.Consumer;

/**
 * Settings of a scan or a follower. Immutable: each method returns other settings. The last start that is set counts.
 */
public final class ScanOptions {
  /** From the first record kept, without a bound. */
  public static final ScanOptions DEFAULT = new ScanOptions(ScanRequest.getDefaultInstance(), failure -> {});

  private final ScanRequest proto;
  private final Consumer<WaldException> interrupted;

  private ScanOptions(ScanRequest proto, Consumer<WaldException> interrupted) {
    this.proto = proto;
    this.interrupted = interrupted;
  }

  private ScanOptions with(ScanRequest.Builder proto) {
    return new ScanOptions(proto.build(), interrupted);
  }

  /** Begins at this lsn; one log only. Below the first lsn kept: a gap comes first. Above the tail: BEYOND_TAIL. */
  public ScanOptions fromLsn(long lsn) {
    return with(proto.toBuilder().setLsn(lsn));
  }

  /** Begins at the first record with this time or a later one, in each log. */
  public ScanOptions fromTime(Instant time) {
    return with(proto.toBuilder().setTimestampUs(Times.micros(time)));
  }

  /** Begins this number of records before the tail; more than 0 for one log only. */
  public ScanOptions last(long records) {
    return with(proto.toBuilder().setTailOffset(records));
  }

  /** Begins with records that are appended from now on. */
  public ScanOptions fromNow() {
    return last(0);
  }

  /**
   * Begins exactly where a scan with the same logs and visibility gave this cursor, also in another process and after a restart of the
   * server (INVALID_SCAN).
   */
  public ScanOptions after(ByteString cursor) {
    return with(proto.toBuilder().setCursor(cursor));
  }

  /** Begins as {@link #after(ByteString)} does. */
  public ScanOptions after(byte[] cursor) {
    return after(ByteString.copyFrom(cursor));
  }

  /** Ends before this lsn; one log only. */
  public ScanOptions untilLsn(long lsn) {
    return with(proto.toBuilder().setUntilLsn(lsn));
  }

  /** Ends after this number of records. Default (0): no bound. */
  public ScanOptions maxRecords(long records) {
    return with(proto.toBuilder().setMaxRecords(records));
  }

  /** Which records to see. Default: those that the log's sync mode acks; of several logs, those that the server's sync mode acks. */
  public ScanOptions visibility(Visibility visibility) {
    return with(proto.toBuilder().setVisibility(visibility.proto()));
  }

  /**
   * Lets any node of the store answer from its copy, which is usually a second old, and at most twice its {@code lease_ttl}. Implies
   * the visibility REPLICATED. With {@link #last} or {@link #fromNow} a follower begins at the tail of that copy, and fails if the
   * connection is lost before the first event.
   */
  public ScanOptions anyNode() {
    return with(proto.toBuilder().setAnyNode(true));
  }

  /** The log must have this number, or LOG_REPLACED; one log only. */
  public ScanOptions logId(long id) {
    return with(proto.toBuilder().setLogId(id));
  }

  /** Calls back when a connection was lost and the scan is going to resume. For logs and metrics; it must not block. */
  public ScanOptions onInterruption(Consumer<WaldException> notice) {
    return new ScanOptions(proto, notice);
  }

  ScanRequest.Builder request() {
    return proto.toBuilder();
  }

  Consumer<WaldException> interrupted() {
    return interrupted;
  }
}
