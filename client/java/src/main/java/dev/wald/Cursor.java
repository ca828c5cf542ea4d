package dev.wald;

import java.time.Instant;

/**
 * A named position of a consumer in a log.
 *
 * @param log the log that the cursor belongs to
 * @param name the cursor's name within the log
 * @param lsn the next lsn to read
 * @param logId the log's number, unique for ever
 * @param updateTime the time of the last move
 */
public record Cursor(String log, String name, long lsn, long logId, Instant updateTime) {}
