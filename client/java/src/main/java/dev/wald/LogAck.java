package dev.wald;

import java.time.Instant;
import java.util.OptionalLong;

/**
 * The result of one log's part of a batch.
 *
 * @param log the log's name
 * @param firstLsn the lsn of the first record
 * @param nextLsn the lsn after the last record
 * @param time the arrival time of the batch
 * @param deduplicated a repeat of a batch that was applied before; this is the original's answer
 * @param durableLsn every lsn of the log below it is flushed to the device
 * @param replicatedLsn every lsn of the log below it is in the bucket of a replica; empty without one
 * @param logId the log's number, unique for ever
 */
public record LogAck(String log, long firstLsn, long nextLsn, Instant time, boolean deduplicated, long durableLsn,
    OptionalLong replicatedLsn, long logId) {}
