package dev.wald;

import java.util.List;

/**
 * Consecutive records of one log.
 *
 * @param log the log's name
 * @param logId the log's number, unique for ever
 * @param records the records, without a hole
 */
public record RecordBatch(String log, long logId, List<StoredRecord> records) {}
