package dev.wald;

import java.util.List;
import java.util.OptionalLong;

/**
 * The answer to an append of a batch.
 *
 * @param appends the result of each log, in the order of the batch
 * @param durability the durability reached, at least the requested one
 * @param position the batch's position in the journal; empty while the batch is in the daemon's memory only, or if it had nothing
 *     but checks
 * @param recoveryEpoch rises with every unclean start of the server
 */
public record BatchAck(List<LogAck> appends, Durability durability, OptionalLong position, long recoveryEpoch) {}
