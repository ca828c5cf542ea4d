package dev.wald;

import java.util.OptionalLong;

/**
 * The state of a log.
 *
 * @param firstLsn the first lsn kept
 * @param tailLsn the next lsn
 * @param durableLsn every lsn below it is flushed to the device
 * @param replicatedLsn every lsn below it is in the bucket of a replica; empty without one
 * @param writerEpoch the writer epoch; 0 until the first fence
 * @param recoveryEpoch rises with every unclean start of the server
 * @param logId the log's number, unique for ever
 * @param survivedPosition end of the survivors of the requested recovery epoch: an append acked in that epoch survived if and only
 *     if its position is below; empty: no epoch was requested, or it is the current one
 */
public record TailInfo(long firstLsn, long tailLsn, long durableLsn, OptionalLong replicatedLsn, long writerEpoch,
    long recoveryEpoch, long logId, OptionalLong survivedPosition) {}
