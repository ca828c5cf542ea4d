package dev.wald;

import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.LogBatch;
import dev.wald.v1.ProducerState;
import dev.wald.v1.StateKind;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.List;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Appends to one log exactly once, over restarts of the server and of the program.
 *
 * <p>It keeps each batch in its state before it sends the batch. Once {@link #appendBatch(List)} has returned, the batch will be in the log
 * once, and in its place: if the program ends before the ack, the next {@link WaldClient#durableProducer(String, State, ProducerOptions)}
 * with the same state sends the batch again. {@link #nextSequence} says where the program goes on in its own input.
 *
 * <pre>
 * appendBatch ─▶ state: [ 7 8 9 ] ──Producer──▶ server
 *                   ▲       ack of 7 ◀─────────────┘
 *                   └ the next start begins at 7
 * </pre>
 *
 * <p>A save costs about two flushes of the state's device, so larger batches go faster. A failure ends it as it ends a {@link Producer}. A
 * batch that the server refuses for good, such as one with a record that is too large, stays in the state, and every later start fails with
 * it: check the size of records before. Acks are taken, and failures are seen, by the next call: call {@link #flush} after the last batch
 * of a while.
 *
 * <p>A batch leaves the state when it is acked, at the durability that the log's sync mode or {@link ProducerOptions#durability} asks for.
 * If this is less than {@link Durability#DURABLE}, a crash of the server can lose acked batches. The server then refuses the producer
 * (PRODUCER_GAP), unless the server has also forgotten it since: the new epoch begins behind the hole, and nobody notices.
 *
 * <p>The server forgets a producer that is idle for longer than its setting {@code producer_max_idle}, 7 days by default. If no batch is in
 * doubt, the producer goes on in a new epoch, and nobody notices. If the state has batches that an earlier run may have appended, nobody
 * can tell whether they are in the log, and every start is refused (PRODUCER_EXPIRED) until somebody decides it with {@code walctl state
 * settle}. For the same reason, never go back to an old copy of a state.
 *
 * <p>One thread at a time may use it.
 */
public final class DurableProducer implements AutoCloseable {
  /** Maximum number of batches that are kept and not acked. Each save writes all of them. */
  static final int BATCHES_KEPT = 64;

  private final WaldClient client;
  private final ProducerOptions options;
  private final HeldState<ProducerState> state;
  /** The batches without a known ack, in order. */
  private final ProducerState.Builder kept;
  /** Answers to the first batches of {@code kept}: those that were sent. */
  private final Deque<CompletableFuture<LogAck>> answers = new ArrayDeque<>();
  private Producer producer;
  /** Number of batches at the beginning of {@code kept} that an earlier run may have sent. */
  private int loaded;
  /** Acks have come since the last save. */
  private boolean unsaved;
  private boolean closed;
  /** The first failure, or that of calls after the close; null: the producer goes on. */
  private Failure ended;

  static DurableProducer open(WaldClient client, String log, State state, ProducerOptions options) {
    HeldState<ProducerState> held =
        HeldState.load(state, ProducerState.parser(), ProducerState::getKind, StateKind.STATE_KIND_PRODUCER, "a producer");
    try {
      ProducerOptions settings = options.inFlight(Math.min(options.batchesInFlight, BATCHES_KEPT), options.bytesInFlight);
      if (held.found.isPresent()) {
        ProducerState found = held.found.get();
        if (!found.getLog().equals(log) || found.getId().isEmpty()) {
          String text = "it is the state of a producer of the log \"" + found.getLog() + "\", not of \"" + log + "\"";
          throw HeldState.refused(text, null).exception();
        }
        settings = settings.id(found.getId(), found.getEpoch()).logId(found.getLogId()).firstSequence(found.getSequence());
      }
      Producer producer = Producer.open(client, log, settings);
      // The state has the id, so the server must not forget it.
      producer.keepId();
      DurableProducer durable = new DurableProducer(client, log, settings, held, producer);
      try {
        durable.begin();
      } catch (RuntimeException failure) {
        durable.abort();
        throw failure;
      }
      return durable;
    } catch (RuntimeException failure) {
      held.release();
      throw failure;
    }
  }

  private DurableProducer(WaldClient client, String log, ProducerOptions settings, HeldState<ProducerState> state, Producer producer) {
    this.client = client;
    this.options = settings.id(producer.id(), producer.epoch()).logId(producer.logId());
    this.state = state;
    this.producer = producer;
    this.kept = state.found.isPresent()
        ? state.found.get().toBuilder()
        : ProducerState.newBuilder().setLog(log).setLogId(producer.logId()).setId(producer.id()).setEpoch(producer.epoch())
            .setSequence(settings.firstSequence).setKind(StateKind.STATE_KIND_PRODUCER);
    this.loaded = kept.getBatchesCount();
  }

  /** Saves the first state, or sends the batches of the one that was found. */
  private void begin() {
    // Before the first batch: without it the next start would be another producer. The last save of a state that was found may have
    // ended before the flush: a crash of the machine could still take the state away, after its batches were sent.
    if (state.found.isEmpty() || kept.getBatchesCount() > 0) {
      save();
    }
    try {
      sendKept(forEver());
    } catch (InterruptedException | TimeoutException stopped) {
      throw givenUp(stopped, false).exception();
    }
  }

  /** The producer's id, which stays over restarts. */
  public String id() {
    return producer.id();
  }

  /** The number of the log that the producer keeps to. */
  public long logId() {
    return producer.logId();
  }

  /**
   * The sequence of the next batch: the number of batches so far, in all runs of the program. After a failure, open the producer again
   * before you rely on it.
   */
  public long nextSequence() {
    return kept.getEarlierBatches() + kept.getSequence() + kept.getBatchesCount();
  }

  /** Keeps and sends one record, the UTF-8 of a text. See {@link #appendBatch(List)}. */
  public long appendBatch(String text) {
    return appendBatch(NewRecord.of(text));
  }

  /** Keeps and sends records as one batch. See {@link #appendBatch(List)}. */
  public long appendBatch(NewRecord... records) {
    return appendBatch(List.of(records));
  }

  /**
   * Keeps the records as one batch, sends it, and returns its sequence. The ack may come later. While 64 batches, or as many as {@link
   * ProducerOptions#inFlight} allows, are not acked, it blocks. If the thread is interrupted before there is room, nothing was kept, and
   * the producer goes on.
   *
   * @throws WaldException the thread was interrupted, there are no records, or the producer has ended. If the outcome is NOT_APPLIED, the
   *     batch was not kept. If it is UNKNOWN, do not append the batch elsewhere: it is in the state, from which the next start sends it, or
   *     may be ({@link #nextSequence} of the next start says so). The kind is STATE if the batch could not be saved; it was not sent then.
   *     The kind is EARLIER_FAILED, with the reason of an earlier batch, if the producer has ended before
   */
  public long appendBatch(List<NewRecord> records) {
    check();
    if (records.isEmpty()) {
      // The server would refuse the batch at every start.
      throw Failure.invalid("a batch has at least 1 record").exception();
    }
    LogBatch batch = LogBatch.newBuilder().addAllRecords(Protos.records(records)).build();
    try {
      makeRoom(batch);
    } catch (InterruptedException | TimeoutException stopped) {
      throw givenUp(stopped, false).exception();
    } catch (WaldException failure) {
      // Not the outcome of the batch that failed.
      check();
      throw failure;
    }
    long sequence = nextSequence();
    kept.addBatches(batch);
    save();
    try {
      sendKept(forEver());
    } catch (InterruptedException | TimeoutException stopped) {
      // The batch is kept nevertheless, and the next call sends it.
      restoreInterrupt(stopped);
    } catch (WaldException failure) {
      throw keptBehind(ended == null ? failure.failure() : ended).exception();
    }
    return sequence;
  }

  /**
   * Waits until all batches are acked, and saves the state.
   *
   * @throws WaldException the first failure; or the thread was interrupted, and the producer goes on
   */
  public void flush() {
    check();
    try {
      flush(forEver());
    } catch (InterruptedException | TimeoutException stopped) {
      throw givenUp(stopped, true).exception();
    }
  }

  private void flush(long deadline) throws InterruptedException, TimeoutException {
    while (kept.getBatchesCount() > 0) {
      sendKept(deadline);
      if (!answers.isEmpty()) {
        awaitAnswer(deadline);
        takeAnswers();
      }
    }
    if (unsaved) {
      save();
    }
  }

  /**
   * Waits until all batches are acked, saves the state, and ends the producer. The next start goes on as the same producer, and sends
   * batches without an ack again. In every case another producer may use the state from now on.
   *
   * @throws WaldException the failure that ended the producer; or the thread was interrupted, and the producer ends at once
   */
  @Override
  public void close() {
    close(Duration.ofNanos(Long.MAX_VALUE / 2));
  }

  /** Closes as {@link #close()} does, within this time. When it is over, the producer ends at once. */
  public void close(Duration timeout) {
    if (closed) {
      return;
    }
    closed = true;
    long deadline = System.nanoTime() + Math.min(Times.nanos(timeout), Long.MAX_VALUE / 4);
    try {
      if (ended != null) {
        throw ended.exception();
      }
      flush(deadline);
      // A later call must not save over the state of the next start.
      ended = Failure.closed("the producer");
      producer.close(Duration.ofNanos(Math.max(0, deadline - System.nanoTime())));
    } catch (InterruptedException | TimeoutException stopped) {
      throw givenUp(stopped, true).exception();
    } finally {
      abort();
    }
  }

  /** Ends the producer at once. Batches without an ack stay in the state. */
  void abort() {
    closed = true;
    if (ended == null) {
      ended = Failure.closed("the producer");
    }
    try {
      producer.close(Duration.ZERO);
    } catch (WaldException reported) {
      // The failure has been reported, or is the end of this time.
      return;
    } finally {
      state.release();
    }
  }

  /** The answer to the first batch without an ack; null: none was sent. */
  CompletableFuture<LogAck> firstAnswer() {
    return answers.peek();
  }

  private AppendSessionRequest.Builder message(LogBatch batch) {
    return producer.message(batch.getRecordsList(), AppendOptions.DEFAULT);
  }

  /** Waits until the batch can be queued at once, after all that are kept. */
  private void makeRoom(LogBatch batch) throws InterruptedException, TimeoutException {
    for (;;) {
      takeAnswers();
      // Batches of an epoch that is over are sent again: their acks make room.
      sendKept(forEver());
      if (producer.failure() != null) {
        takeFailure();
      } else if (kept.getBatchesCount() >= options.batchesInFlight || producer.isFull(message(batch))) {
        awaitAnswer(forEver());
      } else {
        return;
      }
    }
  }

  /** Sends the batches that are kept and were not sent, each as soon as there is room. */
  private void sendKept(long deadline) throws InterruptedException, TimeoutException {
    while (answers.size() < kept.getBatchesCount()) {
      if (isBehind()) {
        save();
        try {
          producer = Producer.open(client, kept.getLog(), options.id(kept.getId(), kept.getEpoch()).firstSequence(0));
        } catch (WaldException failure) {
          throw failed(failure.failure());
        }
      }
      AppendSessionRequest.Builder message = message(kept.getBatches(answers.size()));
      if (producer.failure() != null) {
        takeFailure();
      } else if (producer.isFull(message)) {
        awaitAnswer(deadline);
        takeAnswers();
      } else {
        queue(message);
      }
    }
  }

  private void queue(AppendSessionRequest.Builder message) {
    try {
      answers.add(producer.queue(message));
    } catch (WaldException refused) {
      // It has failed since.
      takeFailure();
    }
  }

  /** Whether the producer is of an epoch that is over. */
  private boolean isBehind() {
    return producer.epoch() != kept.getEpoch();
  }

  /** Waits for the first answer. There is one while the producer has no room. */
  private void awaitAnswer(long deadline) throws InterruptedException, TimeoutException {
    try {
      answers.element().get(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
    } catch (ExecutionException failure) {
      // The answer is taken later.
      return;
    }
  }

  /** Handles the failure of the producer. The first failure is in the first answer that is no ack; it comes at once, or is there. */
  private void takeFailure() {
    while (!answers.isEmpty()) {
      answers.element().handle((ack, failure) -> ack).join();
      takeAnswers();
    }
    if (!isBehind()) {
      throw failed(producer.failure());
    }
  }

  /** Takes batches whose acks have come off the front of the state. */
  private void takeAnswers() {
    for (CompletableFuture<LogAck> first = answers.peek(); first != null && first.isDone(); first = answers.peek()) {
      Failure failure = failureOf(first);
      if (failure != null) {
        OptionalLong epoch = nextEpoch(failure);
        if (epoch.isEmpty()) {
          throw failed(failure);
        }
        beginAgain(epoch.getAsLong());
        return;
      }
      answers.remove();
      kept.removeBatches(0);
      kept.setSequence(kept.getSequence() + 1);
      loaded = Math.max(0, loaded - 1);
      unsaved = true;
    }
  }

  /** Null: the batch is acked. */
  private static Failure failureOf(CompletableFuture<LogAck> answer) {
    try {
      Futures.await(answer);
      return null;
    } catch (WaldException failure) {
      return failure.failure();
    }
  }

  /**
   * The epoch in which the producer goes on after the failure of its first batch in doubt, if it does. The server has forgotten the
   * producer then, and has applied none of the batches: each was sent once, and refused.
   */
  private OptionalLong nextEpoch(Failure failure) {
    boolean forgotten = failure.reason == Reason.PRODUCER_EXPIRED;
    return forgotten && loaded == 0 && failure.outcome == Outcome.NOT_APPLIED ? failure.number("first_epoch") : OptionalLong.empty();
  }

  /** Begins a new epoch, whose batches are not sent yet. */
  private void beginAgain(long epoch) {
    answers.clear();
    kept.setEarlierBatches(kept.getEarlierBatches() + kept.getSequence()).setSequence(0).setEpoch(epoch);
  }

  private void save() {
    try {
      state.save(kept.build());
    } catch (WaldException failure) {
      throw failed(failure.failure());
    } catch (Error fatal) {
      // A later call must not send a batch that may not be saved.
      ended = HeldState.failure(fatal.toString(), fatal);
      throw fatal;
    }
    unsaved = false;
  }

  private WaldException failed(Failure failure) {
    ended = failure;
    return failure.exception();
  }

  /** Fails calls after the end. */
  private void check() {
    if (ended == null) {
      return;
    }
    if (ended.kind == FailureKind.CLOSED) {
      // The call has sent nothing, unlike perhaps the batch that failed.
      throw ended.ofRead().exception();
    }
    Failure later = Producer.behind(ended, false);
    later.cause = ended.exception();
    throw later.exception();
  }

  /** The failure of a batch that was kept, but not sent because of the failure of an earlier one. */
  private static Failure keptBehind(Failure first) {
    Failure failure = Producer.behind(first, false);
    failure.message = "the next start sends the batch; an earlier request failed: " + first.message;
    failure.outcome = Outcome.UNKNOWN;
    failure.retry = Retry.SAFE_WITH_CONDITION;
    failure.cause = first.exception();
    return failure;
  }

  private static long forEver() {
    return System.nanoTime() + Long.MAX_VALUE / 4;
  }

  /** The failure of a call that its caller or its deadline has ended. */
  private static Failure givenUp(Exception stopped, boolean sent) {
    restoreInterrupt(stopped);
    return stopped instanceof InterruptedException ? Failure.givenUp(sent) : Failure.deadlineExceeded(sent);
  }

  private static void restoreInterrupt(Exception stopped) {
    if (stopped instanceof InterruptedException) {
      Thread.currentThread().interrupt();
    }
  }
}
