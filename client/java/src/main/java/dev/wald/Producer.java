package dev.wald;

import dev.wald.v1.AppendBatchRequest;
import dev.wald.v1.AppendCondition;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.CreateLogRequest;
import dev.wald.v1.GetLogRequest;
import dev.wald.v1.LogBatch;
import dev.wald.v1.LogServiceGrpc;
import dev.wald.v1.Record;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.List;
import java.util.OptionalLong;
import java.util.Queue;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Appends to one log exactly once, over any failure of connections, the server and answers. Every batch carries the producer's id and a
 * sequence number, by which the server distinguishes a repeat from a new batch. Batches that are not acked are sent again, in order, with
 * the same numbers, on a new connection, until they are acked or the delivery timeout is over.
 *
 * <pre>
 * send ─▶ unacked: [ 7 8 9 | 10 11 ] ──stream──▶ server
 *                      ▲     ▲    lost? a new stream begins again at 7
 *          ack of 7 ───┘     └ not sent yet
 * </pre>
 *
 * <p>A failure that repeating cannot heal (FENCED, PRODUCER_FENCED, LOG_REPLACED, a condition that does not hold) ends the producer:
 * batches are in order, so nothing after it is applied. Open another one then.
 *
 * <p>Many threads may use a producer at once. Continuations of its futures must not block: use their {@code Async} forms. An open
 * producer has a thread of its own, a daemon.
 */
public final class Producer implements AutoCloseable {
  /** Maximum number of batches that are sent and not acked, unless the program names another. */
  public static final int DEFAULT_BATCHES_IN_FLIGHT = 512;
  /** Maximum bytes that are sent and not acked, unless the program names another: 8 MiB. */
  public static final int DEFAULT_BYTES_IN_FLIGHT = 8 << 20;
  /** The time without an ack after which a producer ends, unless the program names another: 60 s. */
  public static final Duration DEFAULT_DELIVERY_TIMEOUT = Duration.ofSeconds(60);

  /** Number of newest batches of a producer whose repeats the server recognises. */
  private static final int RECOGNISED_BATCHES = 1024;
  /** Maximum time that a close waits for the server to forget a random id. */
  private static final Duration FORGET_TIMEOUT = Duration.ofSeconds(1);
  /** Maximum time that a close waits for the server to end a stream whose batches are all acked. */
  private static final long STREAM_END_NANOS = TimeUnit.SECONDS.toNanos(1);

  private final WaldClient client;
  private final Core core;
  private final ProducerOptions options;
  private final String log;
  private final String id;
  private final long epoch;
  private final long logId;
  private final Runnable cancel = this::cancel;

  private final ReentrantLock lock = new ReentrantLock();
  /** Wakes the producer's own thread, and a close. */
  private final Condition changed = lock.newCondition();
  /** Wakes callers that wait until more can be sent. */
  private final Condition room = lock.newCondition();
  /** Not acked, in order. */
  private final Deque<Pending> unacked = new ArrayDeque<>();
  /** The end of {@code unacked} that is not sent on the stream that is open. */
  private final Deque<Pending> unsent = new ArrayDeque<>();
  /** Answers to give once the lock is free. */
  private final Queue<Runnable> answers = new ConcurrentLinkedQueue<>();
  private long bytes;
  private long next;
  private boolean closing;
  private boolean cancelled;
  private boolean done;
  /** An id that was drawn at random is never used again. */
  private boolean drawn;
  /** The time at which the next ack is overdue, if a batch waits for one. */
  private long overdue;
  /** The time at which the stream that is open is given up, if a batch waits for an ack. */
  private long quiet;
  /** Looks whether an ack is overdue; null: no batch was queued since it looked last and found none. */
  private ScheduledFuture<?> expiry;
  /** The stream that is open; null: none. */
  private Delivery delivery;
  /** Null: it has not failed. */
  private Failure failure;
  /** The reason why the last stream broke; null: none did. */
  private Failure interruption;

  /** A batch that is not acked. */
  private static final class Pending {
    private final AppendSessionRequest message;
    private final int bytes;
    private final CompletableFuture<LogAck> answer = new CompletableFuture<>();
    /** An earlier stream may have brought it to be applied. */
    private boolean unknown;

    private Pending(AppendSessionRequest message, int bytes) {
      this.message = message;
      this.bytes = bytes;
    }
  }

  /** Opens a producer. Waits for a server for as long as the delivery timeout. */
  static Producer open(WaldClient client, String log, ProducerOptions options) {
    if (options.batchesInFlight < 1 || options.batchesInFlight > RECOGNISED_BATCHES) {
      throw Failure.invalid(options.batchesInFlight + " batches in flight: between 1 and " + RECOGNISED_BATCHES + " can be").exception();
    }
    String id = options.id;
    long epoch = options.epoch;
    Long logId = options.logId;
    if (logId == null || id == null) {
      dev.wald.v1.Log found = ensureLog(client.core(), log, options.deliveryTimeout);
      logId = logId == null ? Long.valueOf(found.getLogId()) : logId;
      if (id == null) {
        id = UUID.randomUUID().toString();
        epoch = found.getFirstProducerEpoch();
      }
    }
    return new Producer(client, log, options, id, epoch, logId, options.id == null);
  }

  /** Finds the log, or makes it if there is none. It asks first: only a log that is not there needs the right to create it. */
  static dev.wald.v1.Log ensureLog(Core core, String log, Duration timeout) {
    long deadline = System.nanoTime() + Times.nanos(timeout);
    CallKind create = new CallKind(Repeat.HARMLESS, false, Duration.ZERO, true);
    CallKind get = new CallKind(Repeat.HARMLESS, true, Duration.ZERO, true);
    for (;;) {
      Duration left = Duration.ofNanos(Math.max(0, deadline - System.nanoTime()));
      try {
        return core.call(get, left, LogServiceGrpc.getGetLogMethod(), GetLogRequest.newBuilder().setLog(log).build()).getLog();
      } catch (WaldException refused) {
        if (refused.reason() != Reason.LOG_NOT_FOUND) {
          throw refused;
        }
      }
      try {
        return core.call(create, left, LogServiceGrpc.getCreateLogMethod(), CreateLogRequest.newBuilder().setLog(log).build()).getLog();
      } catch (WaldException refused) {
        // Created in between: by another client, or by an attempt whose answer was lost.
        if (refused.reason() != Reason.LOG_EXISTS) {
          throw refused;
        }
      }
    }
  }

  /** A producer whose id and log are known. {@code drawn}: a close makes the server forget the id. */
  Producer(WaldClient client, String log, ProducerOptions options, String id, long epoch, long logId, boolean drawn) {
    this.client = client;
    this.core = client.core();
    this.options = options;
    this.log = log;
    this.id = id;
    this.epoch = epoch;
    this.logId = logId;
    this.next = options.firstSequence;
    this.drawn = drawn;
    core.endWithClient(cancel);
    Thread thread = new Thread(this::run, "wald-producer-" + id);
    thread.setDaemon(true);
    thread.start();
  }

  /** The producer's id. */
  public String id() {
    return id;
  }

  /** The producer's incarnation. */
  public long epoch() {
    return epoch;
  }

  /** The number of the log that the producer keeps to. */
  public long logId() {
    return logId;
  }

  /** Sends one record, the UTF-8 of a text. See {@link #send(List, AppendOptions)}. */
  public CompletableFuture<LogAck> send(String text) {
    return send(NewRecord.of(text));
  }

  /** Sends records as one batch. See {@link #send(List, AppendOptions)}. */
  public CompletableFuture<LogAck> send(NewRecord... records) {
    return send(List.of(records), AppendOptions.DEFAULT);
  }

  /**
   * Queues records as one batch and returns at once, unless too much is in flight: then it blocks. The future gets the ack, or a {@link
   * WaldException}. A future that the program cancels takes nothing back. The producer replaces the sequence and the log's number
   * of the conditions by its own.
   *
   * @throws WaldException the producer has failed or was closed, or the thread was interrupted; nothing was sent
   */
  public CompletableFuture<LogAck> send(List<NewRecord> records, AppendOptions settings) {
    return queue(message(Protos.records(records), settings));
  }

  /** Appends one record, the UTF-8 of a text. See {@link #append(List, AppendOptions)}. */
  public LogAck append(String text) {
    return append(NewRecord.of(text));
  }

  /** Appends records as one batch. See {@link #append(List, AppendOptions)}. */
  public LogAck append(NewRecord... records) {
    return append(List.of(records), AppendOptions.DEFAULT);
  }

  /**
   * Sends records as one batch and waits for the ack.
   *
   * @throws WaldException the batch was refused, the delivery timeout is over, or the thread was interrupted: then the append continues
   */
  public LogAck append(List<NewRecord> records, AppendOptions settings) {
    return Futures.await(send(records, settings));
  }

  /** A batch of these records. Its sequence is set when it is queued. */
  AppendSessionRequest.Builder message(List<Record> records, AppendOptions settings) {
    AppendCondition.Builder condition = settings.condition().proto().toBuilder();
    if (!condition.hasWriterEpoch()) {
      options.writerEpoch.ifPresent(condition::setWriterEpoch);
    }
    condition.setLogId(logId).getProducerBuilder().setId(id).setEpoch(epoch);
    Durability durability = settings.durability() == Durability.UNSPECIFIED ? options.durability : settings.durability();
    return AppendSessionRequest.newBuilder().setBatch(AppendBatchRequest.newBuilder()
        .addBatches(LogBatch.newBuilder().setLog(log).addAllRecords(records).setCondition(condition))
        .setDurability(durability.proto()));
  }

  /** Numbers a message and queues it, as soon as there is room. */
  CompletableFuture<LogAck> queue(AppendSessionRequest.Builder message) {
    int size = message.getBatch().getSerializedSize();
    lock.lock();
    try {
      awaitRoom(size);
      message.setRequestId(next);
      message.getBatchBuilder().getBatchesBuilder(0).getConditionBuilder().getProducerBuilder().setSequence(next);
      next++;
      Pending added = new Pending(message.build(), size);
      if (unacked.isEmpty()) {
        awaitAck();
      }
      unacked.add(added);
      unsent.add(added);
      bytes += size;
      if (delivery == null) {
        changed.signalAll();
      }
      pump();
      return added.answer;
    } finally {
      lock.unlock();
    }
  }

  /** Begins the time within which the next ack must come. The caller has the lock. */
  private void awaitAck() {
    overdue = System.nanoTime() + Times.nanos(options.deliveryTimeout);
    listen();
    if (expiry == null) {
      expiry = Timer.after(silenceNanos(), this::expire);
    }
  }

  /**
   * Begins the time after which a stream without an ack is given up: a proxy may have lost the server behind it. Another stream then needs
   * time, too. Not much less than half: batches that are sent again count against the rate of a tenant again. The caller has the lock.
   */
  private void listen() {
    quiet = System.nanoTime() + silenceNanos();
  }

  private long silenceNanos() {
    return Times.nanos(options.deliveryTimeout) / 2;
  }

  /** Waits until a batch of this size can be queued. The caller has the lock. */
  private void awaitRoom(int size) {
    try {
      while (!hasRoom(size) && failure == null && !closing) {
        room.await();
      }
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Failure.givenUp(false).exception();
    }
    if (failure != null) {
      throw behind(failure, false).exception();
    }
    if (closing) {
      throw Failure.closed("the producer").exception();
    }
  }

  /** Whether this message would have to wait for room. */
  boolean isFull(AppendSessionRequest.Builder message) {
    int size = message.getBatch().getSerializedSize();
    lock.lock();
    try {
      return !hasRoom(size);
    } finally {
      lock.unlock();
    }
  }

  /** The failure that has ended the producer; null: it has not failed. */
  Failure failure() {
    lock.lock();
    try {
      return failure;
    } finally {
      lock.unlock();
    }
  }

  /** Keeps the server from forgetting an id that was drawn at random. */
  void keepId() {
    lock.lock();
    try {
      drawn = false;
    } finally {
      lock.unlock();
    }
  }

  private boolean hasRoom(int size) {
    return unacked.isEmpty() || unacked.size() < options.batchesInFlight && bytes + size <= options.bytesInFlight;
  }

  /** The failure of a batch after the one that ended its producer. It carries the reason. */
  static Failure behind(Failure first, boolean sent) {
    Failure failure = Failure.earlier(first, sent);
    failure.reason = first.reason;
    failure.reasonText = first.reasonText;
    failure.facts = first.facts;
    failure.retry = first.retry;
    return failure;
  }

  /**
   * Waits until all sent batches are acked, and ends the producer. The server forgets an id that was drawn at random.
   *
   * @throws WaldException the failure that ended the producer; or the thread was interrupted: then the producer ends at once, and the
   *     outcome of batches without an ack is unknown
   */
  @Override
  public void close() {
    close(Duration.ofNanos(Long.MAX_VALUE / 2));
  }

  /**
   * Closes as {@link #close()} does, within this time. When it is over, the producer ends at once, and the outcome of batches without an
   * ack is unknown.
   */
  public void close(Duration timeout) {
    boolean forgets;
    Failure reason;
    long deadline = System.nanoTime() + Math.min(Times.nanos(timeout), Long.MAX_VALUE / 4);
    boolean interrupted = false;
    lock.lock();
    try {
      closing = true;
      changed.signalAll();
      room.signalAll();
      pump();
      endStreamSoon();
      while (!done) {
        long left = deadline - System.nanoTime();
        try {
          if (left <= 0 || interrupted) {
            end(interrupted ? Failure.givenUp(true) : Failure.deadlineExceeded(true), OptionalLong.empty());
            changed.awaitUninterruptibly();
          } else {
            changed.awaitNanos(left);
          }
        } catch (InterruptedException stop) {
          interrupted = true;
        }
      }
      reason = failure;
      forgets = drawn && next > options.firstSequence;
      drawn &= !forgets;
    } finally {
      lock.unlock();
    }
    giveAnswers();
    if (interrupted) {
      Thread.currentThread().interrupt();
    }
    if (reason != null) {
      throw reason.exception();
    }
    if (forgets) {
      try {
        client.withTimeout(FORGET_TIMEOUT).forgetProducer(log, id, logId);
      } catch (WaldException later) {
        // The server forgets the id once it has been idle for long enough.
        return;
      }
    }
  }

  /** Ends with the client. */
  private void cancel() {
    lock.lock();
    try {
      cancelled = true;
      if (delivery != null) {
        delivery.cancel();
      }
      changed.signalAll();
    } finally {
      lock.unlock();
    }
  }

  /** Opens streams, one after the other, for as long as there is something to send. */
  private void run() {
    Pauses pauses = new Pauses(core.settings.retry);
    try {
      while (waitForWork()) {
        Delivery stream = new Delivery();
        Failure trouble = stream.deliver();
        if (stream.acked) {
          pauses.progress();
        }
        if (trouble == null) {
          continue;
        }
        if (!core.allows(Repeat.GUARDED, trouble, stream.attempt, true) || isStopped()) {
          fail(core.isClosed() ? closedAt(trouble) : trouble, trouble.failingRequest());
          return;
        }
        long pause = pauses.next(trouble, stream.attempt);
        options.interrupted.accept(trouble.exception());
        interrupt(trouble);
        rest(pause);
      }
      if (core.isClosed() && isStopped()) {
        fail(Failure.closed("the client"), OptionalLong.empty());
      }
    } catch (Throwable bug) {
      Failure broken = new Failure(FailureKind.USAGE, Status.Code.UNKNOWN, "the producer failed: " + bug, Outcome.UNKNOWN, Retry.NEVER);
      broken.cause = bug;
      fail(broken, OptionalLong.empty());
      if (bug instanceof Error error) {
        throw error;
      }
    } finally {
      core.forget(cancel);
      lock.lock();
      try {
        // The timer would keep this producer, and its client, until then.
        if (expiry != null) {
          expiry.cancel(false);
        }
        done = true;
        changed.signalAll();
      } finally {
        lock.unlock();
      }
    }
  }

  /** The failure of a stream that the close of the client has ended. Its batches may be applied. */
  private static Failure closedAt(Failure trouble) {
    Failure closed = Failure.closed("the client");
    closed.outcome = trouble.outcome;
    return closed;
  }

  /** Pauses before the next stream, while the transport tries to connect. */
  private void rest(long nanos) {
    core.nodes.hasten();
    lock.lock();
    try {
      long end = System.nanoTime() + nanos;
      for (long left = nanos; left > 0 && failure == null && !cancelled; left = end - System.nanoTime()) {
        changed.awaitNanos(left);
      }
    } catch (InterruptedException nobody) {
      // Nobody interrupts this thread; the next stream then begins early.
      return;
    } finally {
      lock.unlock();
    }
  }

  private boolean isStopped() {
    lock.lock();
    try {
      return cancelled || failure != null;
    } finally {
      lock.unlock();
    }
  }

  /** False: there will be nothing to send. */
  private boolean waitForWork() {
    lock.lock();
    try {
      for (;;) {
        if (failure != null || cancelled) {
          return false;
        }
        if (!unacked.isEmpty()) {
          return true;
        }
        if (closing) {
          return false;
        }
        changed.awaitUninterruptibly();
      }
    } finally {
      lock.unlock();
    }
  }

  /** Brings unsent batches onto the stream, as far as it is ready. The caller has the lock. */
  private void pump() {
    if (delivery != null) {
      delivery.pump();
    }
  }

  /** Ends the stream of a closing producer if the server does not: nothing else is due. The caller has the lock. */
  private void endStreamSoon() {
    Delivery open = delivery;
    if (closing && unacked.isEmpty() && open != null) {
      Timer.after(STREAM_END_NANOS, () -> {
        lock.lock();
        try {
          open.ended = true;
          open.cancel();
        } finally {
          lock.unlock();
        }
      });
    }
  }

  /** One stream: sends all unacked batches, and later ones, and takes the acks. The lock guards it. */
  private final class Delivery extends ClientCall.Listener<AppendSessionResponse> {
    private final Attempt attempt = new Attempt();
    private final ClientCall<AppendSessionRequest, AppendSessionResponse> call =
        core.nodes.newCall(WalServiceGrpc.getAppendSessionMethod(), attempt.options().withOnReadyThreshold(Session.READY_BYTES));
    /** The call has started. gRPC may lose a cancellation that comes while it starts. */
    private boolean started;
    private boolean ready;
    private boolean halfClosed;
    private boolean stopped;
    private boolean acked;
    /** The producer has ended the stream, whose batches were all acked. */
    private boolean ended;
    /** The producer has ended the stream, which brought no ack. */
    private boolean silent;
    /** The answer broke the contract; null: it did not. */
    private Failure broken;
    /** Null: the stream has not ended. */
    private Status status;
    private Metadata trailers;

    /** Null: the stream ended with nothing due. */
    private Failure deliver() {
      lock.lock();
      try {
        if (cancelled) {
          return Failure.closed("the client");
        }
        unsent.clear();
        unsent.addAll(unacked);
        delivery = this;
        listen();
      } finally {
        lock.unlock();
      }
      Context.ROOT.run(() -> call.start(this, new Metadata()));
      call.request(1);
      lock.lock();
      try {
        started = true;
        if (cancelled || failure != null || stopped) {
          cancel();
        }
        while (status == null) {
          changed.awaitUninterruptibly();
        }
        delivery = null;
      } finally {
        lock.unlock();
      }
      Failure trouble = broken;
      if (trouble == null && silent) {
        String detail = "no ack within " + options.deliveryTimeout.dividedBy(2);
        trouble = core.nodes.failedAt(attempt, Failure.lost(detail, attempt.sent));
      } else if (trouble == null) {
        trouble = status.isOk()
            ? Failure.lost("the server ended the stream", attempt.sent)
            : core.readFailure(status, trailers, attempt, attempt.sent, stopped);
      }
      lock.lock();
      try {
        if (unacked.isEmpty() && failure == null && (ended && !cancelled || core.allows(Repeat.GUARDED, trouble, attempt, true))) {
          return null;
        }
        return trouble;
      } finally {
        lock.unlock();
      }
    }

    private void pump() {
      if (!ready || stopped || halfClosed || status != null) {
        return;
      }
      while (!unsent.isEmpty() && call.isReady()) {
        call.sendMessage(unsent.poll().message);
      }
      if (closing && unsent.isEmpty()) {
        halfClosed = true;
        call.halfClose();
      }
    }

    /** Ends the stream. */
    private void cancel() {
      stopped = true;
      if (started) {
        call.cancel("the producer has left the stream", null);
      }
    }

    @Override
    public void onReady() {
      lock.lock();
      try {
        ready = true;
        pump();
      } finally {
        lock.unlock();
      }
    }

    @Override
    public void onMessage(AppendSessionResponse answer) {
      lock.lock();
      try {
        take(answer);
        acked = true;
        call.request(1);
      } catch (WaldException fault) {
        broken = fault.failure();
        cancel();
      } finally {
        lock.unlock();
      }
      giveAnswers();
    }

    private void take(AppendSessionResponse answer) {
      if (unacked.size() == unsent.size() || unacked.peek().message.getRequestId() != answer.getRequestId()) {
        throw Failure.brokenContract("the ack of a batch in its order").exception();
      }
      BatchAck ack = Protos.batchAck(answer.getAck());
      if (ack.appends().size() != 1) {
        throw Failure.brokenContract("AppendBatchResponse.appends").exception();
      }
      Pending batch = unacked.poll();
      bytes -= batch.bytes;
      if (!unacked.isEmpty()) {
        awaitAck();
      }
      answers.add(() -> batch.answer.complete(ack.appends().get(0)));
      room.signalAll();
      endStreamSoon();
    }

    @Override
    public void onClose(Status end, Metadata last) {
      lock.lock();
      try {
        status = end;
        trailers = last;
        changed.signalAll();
      } finally {
        lock.unlock();
      }
    }
  }

  /** Handles a broken stream. Its batches may have been applied, unless the server reports that they were not. */
  private void interrupt(Failure trouble) {
    lock.lock();
    try {
      if (trouble.outcome == Outcome.UNKNOWN) {
        int sent = unacked.size() - unsent.size();
        unacked.stream().limit(sent).forEach(batch -> batch.unknown = true);
      }
      unsent.clear();
      unsent.addAll(unacked);
      interruption = trouble;
    } finally {
      lock.unlock();
    }
  }

  /** An ack may be overdue. */
  private void expire() {
    lock.lock();
    try {
      expiry = null;
      if (unacked.isEmpty()) {
        return;
      }
      long left = overdue - System.nanoTime();
      if (left > 0) {
        expiry = Timer.after(Math.min(left, endSilent()), this::expire);
        return;
      }
      Failure late = new Failure(FailureKind.TIMEOUT, Status.Code.DEADLINE_EXCEEDED, "no ack within " + options.deliveryTimeout,
          Outcome.NOT_APPLIED, Retry.SAFE);
      if (interruption != null) {
        late.server = interruption.server;
        late.message += ": " + interruption.message;
        late.cause = interruption.exception();
      }
      boolean sent = unacked.size() > unsent.size() || unacked.peek().unknown;
      end(sent ? late.afterUnknown() : late, OptionalLong.empty());
    } finally {
      lock.unlock();
    }
    giveAnswers();
  }

  /** Gives the stream up if it has brought no ack for too long. Returns the time until it may have to. The caller has the lock. */
  private long endSilent() {
    long left = delivery == null ? silenceNanos() : quiet - System.nanoTime();
    if (left > 0) {
      return left;
    }
    delivery.silent = true;
    delivery.cancel();
    return silenceNanos();
  }

  /** Ends the producer, and gives every batch that is not acked its error. */
  private void fail(Failure reason, OptionalLong failing) {
    lock.lock();
    try {
      end(reason, failing);
    } finally {
      lock.unlock();
    }
    giveAnswers();
  }

  /** The caller has the lock, and gives the answers later. */
  private void end(Failure reason, OptionalLong failing) {
    if (failure != null) {
      return;
    }
    failure = reason;
    int sent = unacked.size() - unsent.size();
    int index = 0;
    for (Pending batch : unacked) {
      boolean first = index == 0;
      boolean out = index < sent;
      Failure of = Failure.ofRequest(reason, failing, batch.message.getRequestId(), first, out);
      if (first && failing.isEmpty()) {
        of = reason;
      } else if (of.kind == FailureKind.EARLIER_FAILED) {
        of = behind(reason, out);
      }
      Failure its = batch.unknown ? of.afterUnknown() : of;
      answers.add(() -> batch.answer.completeExceptionally(its.exception()));
      index++;
    }
    unacked.clear();
    unsent.clear();
    bytes = 0;
    changed.signalAll();
    room.signalAll();
    if (delivery != null) {
      delivery.cancel();
    }
  }

  /** Answers waiters without the lock: their continuations may call the producer. */
  private void giveAnswers() {
    for (Runnable answer = answers.poll(); answer != null; answer = answers.poll()) {
      answer.run();
    }
  }
}
