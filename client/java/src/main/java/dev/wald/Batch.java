package dev.wald;

import dev.wald.v1.AppendBatchRequest;
import dev.wald.v1.LogBatch;
import java.util.List;

/**
 * An append to one or more logs, all or nothing. Immutable.
 *
 * <pre>{@code
 * Batch batch = Batch.builder()
 *     .append("orders", NewRecord.of("second"), NewRecord.of("third"))
 *     .append("audit", NewRecord.of("two orders"))
 *     .move(CursorCommit.of("orders", "billing", 1))
 *     .build();
 * }</pre>
 */
public final class Batch {
  private final AppendBatchRequest proto;

  private Batch(AppendBatchRequest proto) {
    this.proto = proto;
  }

  /** A batch of one log. */
  public static Batch of(String log, NewRecord... records) {
    return builder().append(log, records).build();
  }

  /** An empty builder. */
  public static Builder builder() {
    return new Builder();
  }

  AppendBatchRequest proto() {
    return proto;
  }

  /** The effect of a repeat. The batch is all or nothing, so one guard is enough. */
  Repeat repeat() {
    boolean guarded = proto.getBatchesList().stream().anyMatch(part -> Condition.guards(part.getCondition()))
        || proto.getCursorsList().stream().anyMatch(CursorCommit::guards);
    if (guarded) {
      return Repeat.GUARDED;
    }
    // Checks alone change nothing.
    return proto.getBatchesCount() == 0 && proto.getCursorsCount() == 0 ? Repeat.HARMLESS : Repeat.HARMFUL;
  }

  /** Collects the parts of a batch. */
  public static final class Builder {
    private final AppendBatchRequest.Builder proto = AppendBatchRequest.newBuilder();

    private Builder() {}

    /** Appends records to a log. Each log may occur once in a batch (DUPLICATE_LOG). */
    public Builder append(String log, NewRecord... records) {
      return append(log, List.of(records), Condition.NONE);
    }

    /** Appends records to a log if all conditions hold. */
    public Builder append(String log, List<NewRecord> records, Condition condition) {
      LogBatch.Builder part = LogBatch.newBuilder().setLog(log).addAllRecords(Protos.records(records));
      if (!condition.equals(Condition.NONE)) {
        part.setCondition(condition.proto());
      }
      proto.addBatches(part);
      return this;
    }

    /** Adds a condition on a log that the batch does not write. */
    public Builder check(Check check) {
      proto.addChecks(check.proto());
      return this;
    }

    /** Moves a cursor in the same step. */
    public Builder move(CursorCommit commit) {
      proto.addCursors(commit.proto());
      return this;
    }

    /** Sets the durability that all must reach before the answer. Default: the strongest of the logs' sync modes. */
    public Builder durability(Durability durability) {
      proto.setDurability(durability.proto());
      return this;
    }

    /** The batch of all parts. */
    public Batch build() {
      return new Batch(proto.build());
    }
  }
}
