package dev.wald;

import java.time.Instant;
import java.util.OptionalLong;

/**
 * The answer to an append of one record.
 *
 * @param lsn the record's number in its log
 * @param time the record's stored time
 * @param durability the durability reached, at least the requested one
 * @param deduplicated a repeat of an append that was applied before; this is the original's answer
 * @param durableLsn every lsn of the log below it is flushed to the device
 * @param replicatedLsn every lsn of the log below it is in the bucket of a replica; empty without one
 * @param position the record's position in the journal; empty while the record is in the daemon's memory only
 * @param recoveryEpoch rises with every unclean start of the server
 * @param logId the log's number, unique for ever
 */
public record Ack(long lsn, Instant time, Durability durability, boolean deduplicated, long durableLsn, OptionalLong replicatedLsn,
    OptionalLong position, long recoveryEpoch, long logId) {}
