package dev.wald;

import dev.wald.v1.LogConfig;
import java.time.Instant;
import java.util.OptionalLong;

/**
 * A log: its configuration and its state.
 *
 * @param name the log's name
 * @param logId the log's number, unique for ever
 * @param config the configuration as it was given; unset fields mean the server's defaults
 * @param firstLsn the first lsn kept
 * @param tailLsn the next lsn to be given out
 * @param durableLsn every lsn below it is flushed to the device
 * @param replicatedLsn every lsn below it is in the bucket of a replica; empty without one
 * @param writerEpoch the writer epoch; 0 until the first fence
 * @param storedBytes bytes of the kept records, as they are stored
 * @param createTime the time at which the log was created
 * @param updateTime the time of the last change of the configuration
 * @param firstProducerEpoch the lowest epoch of a producer that the log does not know
 */
public record LogInfo(String name, long logId, LogConfig config, long firstLsn, long tailLsn, long durableLsn,
    OptionalLong replicatedLsn, long writerEpoch, long storedBytes, Instant createTime, Instant updateTime, long firstProducerEpoch) {}
