package dev.wald;

import java.util.List;
import java.util.OptionalLong;

/**
 * A bounded piece of one log.
 *
 * @param records consecutive records
 * @param nextLsn the lsn to read next: after the last record, or the begin of the read if there is none
 * @param tailLsn the tail at the visibility of the read
 * @param durableLsn every lsn of the log below it is flushed to the device
 * @param replicatedLsn every lsn of the log below it is in the bucket of a replica; empty without one
 * @param firstLsn the first lsn kept
 * @param recoveryEpoch rises with every unclean start of the server
 */
public record Page(List<StoredRecord> records, long nextLsn, long tailLsn, long durableLsn, OptionalLong replicatedLsn,
    long firstLsn, long recoveryEpoch) {}
