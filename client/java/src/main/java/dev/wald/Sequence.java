package dev.wald;

/**
 * The producer and the sequence number of a batch, which make its retries exactly-once.
 *
 * @param producerId the name of the source, 1 to 255 bytes of UTF-8
 * @param epoch the incarnation of the source; a higher one takes over
 * @param number counts the batches of the source in this log from 0, again from 0 in a higher epoch
 */
public record Sequence(String producerId, long epoch, long number) {}
