package dev.wald;

import com.google.protobuf.ByteString;
import java.util.List;
import java.util.OptionalLong;

/**
 * A piece of a scan.
 *
 * @param gaps missing records, before the batches
 * @param batches records, in order
 * @param caughtUp everything that was there has been delivered
 * @param cursor resumes exactly after this event; store it in one step with the effects of the whole event
 * @param tailLsn the tail; of a scan of one log
 * @param durableLsn every lsn below it is flushed to the device; of a scan of one log
 * @param replicatedLsn every lsn below it is in the bucket of a replica; of a scan of one log; empty without one
 * @param recoveryEpoch rises with every unclean start of the server
 */
public record ScanEvent(List<Gap> gaps, List<RecordBatch> batches, boolean caughtUp, ByteString cursor, OptionalLong tailLsn,
    OptionalLong durableLsn, OptionalLong replicatedLsn, long recoveryEpoch) {
  static ScanEvent of(dev.wald.v1.ScanResponse message) {
    return new ScanEvent(message.getGapsList().stream().map(Gap::new).toList(),
        message.getBatchesList().stream().map(Protos::batch).toList(),
        message.getCaughtUp(), message.getCursor(), Protos.optional(message.hasTailLsn(), message.getTailLsn()),
        Protos.optional(message.hasDurableLsn(), message.getDurableLsn()),
        Protos.optional(message.hasReplicatedLsn(), message.getReplicatedLsn()), message.getRecoveryEpoch());
  }

  /** Number of records in all batches. */
  public long recordCount() {
    return batches.stream().mapToLong(batch -> batch.records().size()).sum();
  }
}
