package dev.wald;

import java.time.Duration;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.function.Consumer;

/** Settings of a producer. Immutable: each method returns other settings. */
public final class ProducerOptions implements Cloneable {
  /** A producer with an id that is drawn at random, and the bounds of {@link Producer}. */
  public static final ProducerOptions DEFAULT = new ProducerOptions();

  String id;
  long epoch;
  long firstSequence;
  Long logId;
  int batchesInFlight = Producer.DEFAULT_BATCHES_IN_FLIGHT;
  int bytesInFlight = Producer.DEFAULT_BYTES_IN_FLIGHT;
  Duration deliveryTimeout = Producer.DEFAULT_DELIVERY_TIMEOUT;
  Durability durability = Durability.UNSPECIFIED;
  OptionalLong writerEpoch = OptionalLong.empty();
  Consumer<WaldException> interrupted = failure -> {};

  private ProducerOptions() {}

  private ProducerOptions copy() {
    try {
      return (ProducerOptions) clone();
    } catch (CloneNotSupportedException impossible) {
      throw new AssertionError(impossible);
    }
  }

  /**
   * Names the producer. A program that opens the producer again with the same id and epoch, and sends the same batches again, appends none
   * of them twice. The server recognises only the last 1,024 batches (PRODUCER_EXPIRED): see {@link #firstSequence}. A higher epoch takes
   * over from a lower one, which is shut out, counts from 0 again, and recognises no batch of the lower one. The first is 0. Default: an
   * id drawn at random, which {@link Producer#close()} makes the server forget, with the lowest epoch that the log takes.
   */
  public ProducerOptions id(String id, long epoch) {
    ProducerOptions changed = copy();
    changed.id = id;
    changed.epoch = epoch;
    return changed;
  }

  /** The number of the first batch: for a program that starts again, the one after the last whose ack it has stored. Default: 0. */
  public ProducerOptions firstSequence(long number) {
    ProducerOptions changed = copy();
    changed.firstSequence = number;
    return changed;
  }

  /**
   * The log must have this number, or LOG_REPLACED. Default: the log's number when the producer is opened; the log is created if there is
   * none.
   */
  public ProducerOptions logId(long id) {
    ProducerOptions changed = copy();
    changed.logId = id;
    return changed;
  }

  /**
   * Maximum that is sent and not acked before {@link Producer#send} blocks. Default: 512 batches, 8 MiB. At most 1,024 batches: the server
   * may not recognise the repeats of more. One batch is let through even if it alone is larger.
   */
  public ProducerOptions inFlight(int batches, int bytes) {
    ProducerOptions changed = copy();
    changed.batchesInFlight = batches;
    changed.bytesInFlight = bytes;
    return changed;
  }

  /**
   * The time without an ack, over all repeats, after which the producer ends. It begins with each ack, and with a batch that is queued
   * while no other waits. Default: 60 s. A stream that brings no ack for half of it is given up, and its batches are sent again on another
   * one.
   */
  public ProducerOptions deliveryTimeout(Duration timeout) {
    ProducerOptions changed = copy();
    changed.deliveryTimeout = timeout;
    return changed;
  }

  /** The durability that batches must reach before they are acked. Default: as the log's sync mode says. */
  public ProducerOptions durability(Durability durability) {
    ProducerOptions changed = copy();
    changed.durability = durability;
    return changed;
  }

  /** The log must have this writer epoch, or FENCED. It goes with every batch. A log that was fenced takes no batch without it. */
  public ProducerOptions writerEpoch(long epoch) {
    ProducerOptions changed = copy();
    changed.writerEpoch = OptionalLong.of(epoch);
    return changed;
  }

  /** Calls back when a stream broke and everything unacked is going to be sent again. For logs and metrics; it must not block. */
  public ProducerOptions onInterruption(Consumer<WaldException> notice) {
    ProducerOptions changed = copy();
    changed.interrupted = notice;
    return changed;
  }

  /** The id; empty: drawn at random. */
  public Optional<String> id() {
    return Optional.ofNullable(id);
  }
}
