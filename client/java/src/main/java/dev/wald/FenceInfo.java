package dev.wald;

/**
 * The state of a log once older writers are shut out.
 *
 * @param tailLsn the tail that no older writer can pass
 * @param writerEpoch the writer epoch now
 * @param logId the log's number, unique for ever
 */
public record FenceInfo(long tailLsn, long writerEpoch, long logId) {}
