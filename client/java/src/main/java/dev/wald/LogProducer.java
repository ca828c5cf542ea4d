package dev.wald;

import java.time.Instant;

/**
 * A producer of a log as the server knows it.
 *
 * @param id the producer's id
 * @param epoch the newest epoch; the server refuses lower ones (PRODUCER_FENCED)
 * @param nextSequence the sequence of the next batch in this epoch
 * @param lastAppendTime the arrival time of the newest batch; an idle producer is forgotten 7 days later (setting
 *     {@code producer_max_idle} of the server)
 */
public record LogProducer(String id, long epoch, long nextSequence, Instant lastAppendTime) {}
