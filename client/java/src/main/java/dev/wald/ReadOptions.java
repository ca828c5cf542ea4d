package dev.wald;

import dev.wald.v1.ReadRequest;
import java.time.Duration;
import java.time.Instant;

/** Settings of a read of one page. Immutable: each method returns other settings. The last start that is set counts. */
public final class ReadOptions {
  /** From the first record kept, at most 100 records, without a wait. */
  public static final ReadOptions DEFAULT = new ReadOptions(ReadRequest.getDefaultInstance());

  private final ReadRequest proto;

  private ReadOptions(ReadRequest proto) {
    this.proto = proto;
  }

  /** Begins at this lsn. Below the first lsn kept: TRIMMED. Above the tail: BEYOND_TAIL. */
  public ReadOptions fromLsn(long lsn) {
    return new ReadOptions(proto.toBuilder().setLsn(lsn).build());
  }

  /** Begins at the first record with this time or a later one. */
  public ReadOptions fromTime(Instant time) {
    return new ReadOptions(proto.toBuilder().setTimestampUs(Times.micros(time)).build());
  }

  /** Begins this number of records before the tail; 0: at the tail. */
  public ReadOptions last(long records) {
    return new ReadOptions(proto.toBuilder().setTailOffset(records).build());
  }

  /** Maximum number of records. Default: 100. */
  public ReadOptions maxRecords(int records) {
    return new ReadOptions(proto.toBuilder().setMaxRecords(records).build());
  }

  /** Maximum bytes of records. Default: as many as keep the answer below 1 MiB. One record is returned even if it alone is larger. */
  public ReadOptions maxBytes(int bytes) {
    return new ReadOptions(proto.toBuilder().setMaxBytes(bytes).build());
  }

  /** Maximum wait for a first record if there is none. Comes on top of the client's timeout. Default: no wait. */
  public ReadOptions maxWait(Duration wait) {
    return new ReadOptions(proto.toBuilder().setWait(Times.proto(wait)).build());
  }

  /** Which records to see. Default: those that the log's sync mode acks. */
  public ReadOptions visibility(Visibility visibility) {
    return new ReadOptions(proto.toBuilder().setVisibility(visibility.proto()).build());
  }

  /**
   * Lets any node of the store answer from its copy, which is usually a second old, and at most twice its {@code lease_ttl}. Implies
   * the visibility REPLICATED.
   */
  public ReadOptions anyNode() {
    return new ReadOptions(proto.toBuilder().setAnyNode(true).build());
  }

  /** The log must have this number, or LOG_REPLACED. */
  public ReadOptions logId(long id) {
    return new ReadOptions(proto.toBuilder().setLogId(id).build());
  }

  ReadRequest request(String log) {
    return proto.toBuilder().setLog(log).build();
  }
}
