package dev.wald;

import com.google.protobuf.ByteString;
import dev.wald.v1.GetTailRequest;
import dev.wald.v1.ScanRequest;
import dev.wald.v1.ScanResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * A scan underway, or a follower: a scan that continues with records that are appended later, without end. It outlives its connections:
 *
 * <pre>
 *          open                     message                   lost
 * (closed) ─────▶ (open) ──────────────────────────▶ (open) ──────────▶ (closed)
 *    ▲        begin at the start,   becomes an event                       │
 *    │        or at the last cursor with its cursor                        │
 *    └──────────────────────── pause, longer each time ────────────────────┘
 * </pre>
 *
 * <p>A message becomes one event, with the cursor that resumes after it. Nothing comes twice and nothing is skipped, whatever the caller
 * does with the cursor.
 *
 * <p>One thread at a time may use a scan; {@link #close} may come from any thread, and ends a wait for the next event.
 */
public final class Scan implements Iterable<ScanEvent>, AutoCloseable {
  /** Number of messages that are requested before the caller takes them. Each has up to 1 MiB. */
  private static final int AHEAD = 4;

  private final WaldClient client;
  private final Core core;
  private final ScanOptions options;
  private final ScanRequest.Builder request;
  private final boolean bounded;
  private final Pauses pauses;
  private final Runnable wake = this::wake;

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  private volatile boolean closed;
  /** Null: no stream is open. */
  private ClientCall<ScanRequest, ScanResponse> call;

  private Inbox<ScanResponse> inbox;
  private Attempt attempt;
  private Place place = Place.START;
  /** Whether a message has come, also a heartbeat. */
  private boolean begun;
  private boolean caughtUp;
  private boolean ended;
  /** Null: it has not failed. */
  private Failure failure;
  /** The question for the tail that is underway; null: none. A caller who loses patience leaves it to the next call. */
  private volatile FutureTask<TailInfo> question;
  /** The time before which no stream is opened. */
  private long pausedUntil = System.nanoTime();
  /** The begin of the attempt that failed first since the last message; null: none. */
  private Long failingSince;
  /** The time of waiting since the last message. */
  private long silentNanos;
  private ByteString cursor;

  /** The place at which the next stream would begin. */
  private enum Place {
    /** The start that the caller gave. */
    START,
    /** After the last message; the request holds its cursor. */
    CURSOR,
    /** Not known; going on could repeat or skip records. */
    NOWHERE
  }

  Scan(WaldClient client, Logs logs, ScanOptions options, boolean follow) {
    this.client = client;
    this.core = client.core();
    this.options = options;
    this.request = options.request().setFollow(follow);
    logs.select(request);
    this.bounded = request.getMaxRecords() > 0;
    this.pauses = new Pauses(core.settings.retry);
    core.endWithClient(wake);
  }

  /**
   * Waits for the next event. Empty: the scan has come to its end, or was closed.
   *
   * @throws WaldException the scan has failed; or the thread was interrupted, and a later call continues
   */
  public Optional<ScanEvent> next() {
    return next(Duration.ofNanos(Long.MAX_VALUE / 2));
  }

  /**
   * Waits for the next event, at most this long. Empty: none came in time, or the scan has ended; {@link #isEnded} reports which.
   *
   * @throws WaldException the scan has failed; or the thread was interrupted, and a later call continues
   */
  public Optional<ScanEvent> next(Duration timeout) {
    long deadline = System.nanoTime() + Math.min(Times.nanos(timeout), Long.MAX_VALUE / 4);
    try {
      for (;;) {
        if (closed) {
          finish(null);
        }
        if (failure != null) {
          throw failure.exception();
        }
        if (ended) {
          return Optional.empty();
        }
        long left = deadline - System.nanoTime();
        if (inbox == null) {
          boolean goesOn = pause(Math.min(left, pausedUntil - System.nanoTime())) && open(left);
          if (!goesOn && deadline - System.nanoTime() <= 0) {
            return Optional.empty();
          }
          continue;
        }
        ScanEvent event = take(left);
        if (event != null) {
          cursor = event.cursor();
          return Optional.of(event);
        }
        if (inbox != null && deadline - System.nanoTime() <= 0) {
          return Optional.empty();
        }
      }
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Failure.givenUp(true).ofRead().exception();
    }
  }

  /** Whether no more events come: the scan has come to its end, failed, or was closed. */
  public boolean isEnded() {
    return ended || failure != null || closed;
  }

  /** Resumes exactly after the last event; empty before the first. */
  public Optional<ByteString> cursor() {
    return Optional.ofNullable(cursor);
  }

  /** The remaining events. Its {@code hasNext} waits for an event, and fails as {@link #next()} does. */
  @Override
  public Iterator<ScanEvent> iterator() {
    return new Iterator<>() {
      private Optional<ScanEvent> ahead = Optional.empty();

      @Override
      public boolean hasNext() {
        if (ahead.isEmpty()) {
          ahead = Scan.this.next();
        }
        return ahead.isPresent();
      }

      @Override
      public ScanEvent next() {
        if (!hasNext()) {
          throw new NoSuchElementException();
        }
        ScanEvent event = ahead.get();
        ahead = Optional.empty();
        return event;
      }
    };
  }

  /** Ends the scan. */
  @Override
  public void close() {
    closed = true;
    wake();
    core.forget(wake);
  }

  /** Ends the stream that is open, and every wait. */
  private void wake() {
    FutureTask<TailInfo> asked = question;
    if (asked != null) {
      asked.cancel(true);
    }
    ClientCall<ScanRequest, ScanResponse> open;
    lock.lock();
    try {
      open = call;
      changed.signalAll();
    } finally {
      lock.unlock();
    }
    if (open != null) {
      open.cancel("the scan is closed", null);
    }
  }

  /** The scan has ended: in good order without a failure. */
  private void finish(Failure reason) {
    failure = reason;
    ended = reason == null;
    drop();
    core.forget(wake);
  }

  /** Leaves the stream that is open. */
  private void drop() {
    ClientCall<ScanRequest, ScanResponse> open;
    lock.lock();
    try {
      open = call;
      call = null;
    } finally {
      lock.unlock();
    }
    inbox = null;
    if (open != null) {
      open.cancel("the scan has left the stream", null);
    }
  }

  /** Waits. True: the pause is over, and the scan may go on. */
  private boolean pause(long nanos) throws InterruptedException {
    lock.lockInterruptibly();
    try {
      long left = nanos;
      while (left > 0 && !closed && !core.isClosed()) {
        left = changed.awaitNanos(left);
      }
    } finally {
      lock.unlock();
    }
    if (core.isClosed() && !closed) {
      finish(Failure.closed("the client").ofRead());
      return false;
    }
    return !closed && pausedUntil - System.nanoTime() <= 0;
  }

  /** Opens a stream. False: the time was too short, and a later call continues. */
  private boolean open(long nanos) throws InterruptedException {
    if (failingSince == null) {
      failingSince = System.nanoTime();
    }
    attempt = new Attempt();
    Failure trouble;
    try {
      trouble = pinTailOffset(nanos);
    } catch (TimeoutException | CancellationException none) {
      return false;
    }
    if (trouble != null) {
      survive(trouble);
      return true;
    }
    ClientCall<ScanRequest, ScanResponse> opened = core.nodes.newCall(WalServiceGrpc.getScanMethod(), attempt.options());
    Inbox<ScanResponse> answers = new Inbox<>();
    // A deadline of the caller's scope is not the scan's.
    Context.current().fork().run(() -> opened.start(answers, new Metadata()));
    opened.request(AHEAD);
    opened.sendMessage(request.build());
    opened.halfClose();
    silentNanos = 0;
    lock.lock();
    try {
      call = opened;
    } finally {
      lock.unlock();
    }
    inbox = answers;
    if (closed || core.isClosed()) {
      opened.cancel("the scan is closed", null);
    }
    return true;
  }

  /**
   * Turns "n before the tail" of one log into an lsn, so that a connection that is lost before the first message can be replaced without
   * skipping records that arrived meanwhile. With {@code any_node} only the node knows the tail of its copy: the owner's tail may be
   * above it.
   */
  private Failure pinTailOffset(long nanos) throws InterruptedException, TimeoutException {
    if (!request.getFollow() || !request.hasLog() || !request.hasTailOffset() || request.getAnyNode()) {
      return null;
    }
    if (question == null) {
      askForTail();
    }
    try {
      TailInfo tail = question.get(nanos, TimeUnit.NANOSECONDS);
      question = null;
      long from = tail.tailLsn() - Math.min(request.getTailOffset(), tail.tailLsn());
      request.setLsn(Math.max(from, tail.firstLsn()));
      return null;
    } catch (ExecutionException failed) {
      question = null;
      if (!(failed.getCause() instanceof WaldException refused)) {
        throw new IllegalStateException(failed.getCause());
      }
      if (refused.reason() != Reason.LOG_NOT_FOUND) {
        return refused.failure();
      }
      // All that will ever be in it is still to come.
      request.clearStart();
      return null;
    }
  }

  /** Asks for the tail on a thread of its own, so that a caller can give up the wait for it. */
  private void askForTail() {
    GetTailRequest.Builder message = GetTailRequest.newBuilder().setLog(request.getLog()).setVisibility(request.getVisibility());
    if (request.hasLogId()) {
      message.setLogId(request.getLogId());
    }
    // A deadline of the caller's scope is not the scan's.
    FutureTask<TailInfo> asked = new FutureTask<>(Context.current().fork().wrap(() -> client.tail(message.build())));
    question = asked;
    if (closed || core.isClosed()) {
      asked.cancel(true);
    }
    Thread thread = new Thread(asked, "wald-scan-tail");
    thread.setDaemon(true);
    thread.start();
  }

  /** Takes a message. Null: it was no news, none came in time, or the stream has ended. */
  private ScanEvent take(long nanos) throws InterruptedException {
    long silence = Times.nanos(core.settings.silenceTimeout) - silentNanos;
    long began = System.nanoTime();
    ScanResponse message = inbox.take(Math.min(nanos, silence));
    if (message != null) {
      silentNanos = 0;
      call.request(1);
      return accept(message);
    }
    silentNanos += System.nanoTime() - began;
    Status status = inbox.status();
    if (status == null) {
      if (silentNanos >= Times.nanos(core.settings.silenceTimeout)) {
        broke(core.nodes.failedAt(attempt, Failure.lost("nothing came for " + core.settings.silenceTimeout, true)));
      }
      return null;
    }
    if (closed) {
      finish(null);
    } else if (core.isClosed()) {
      finish(Failure.closed("the client").ofRead());
    } else if (!status.isOk()) {
      broke(core.readFailure(status, inbox.trailers(), attempt, attempt.sent, false));
    } else if (request.getFollow() && !bounded && !request.hasUntilLsn()) {
      broke(Failure.lost("the server ended the stream", true));
    } else {
      finish(null);
    }
    return null;
  }

  /** The stream has failed. Once a stream was open, "the tail" is in the past, and only a cursor can name it. */
  private void broke(Failure trouble) {
    if (inbox.wasOpen() && request.hasTailOffset() && place == Place.START) {
      place = Place.NOWHERE;
    }
    survive(trouble);
  }

  /** Makes an event of a message. The request moves on with it. */
  private ScanEvent accept(ScanResponse message) {
    ScanEvent event;
    try {
      event = ScanEvent.of(message);
    } catch (WaldException broken) {
      survive(broken.failure());
      return null;
    }
    long count = event.recordCount();
    boolean news = count > 0 || !event.gaps().isEmpty() || event.caughtUp() && !caughtUp;
    begun = true;
    caughtUp = event.caughtUp() || caughtUp && count == 0;
    // A heartbeat before the first piece has no cursor: the next stream begins where this one began.
    if (news || event.caughtUp() || !event.cursor().isEmpty()) {
      place = event.cursor().isEmpty() ? Place.NOWHERE : Place.CURSOR;
      request.setCursor(event.cursor());
    }
    pauses.progress();
    failingSince = null;
    if (bounded) {
      request.setMaxRecords(Math.max(0, request.getMaxRecords() - count));
      if (request.getMaxRecords() == 0) {
        // Asked again it would be 0, which is: without bound.
        finish(null);
      }
    }
    return news ? event : null;
  }

  /** Prepares the next stream, or ends the scan with the failure. */
  private void survive(Failure trouble) {
    drop();
    long pause = pauses.next(trouble, attempt);
    // A follower that has begun has no end to its patience; its owner may have.
    boolean patient = request.getFollow() && begun;
    long now = System.nanoTime();
    if (failingSince == null) {
      failingSince = now;
    }
    boolean tired = pauses.exhausted() || now - failingSince + pause >= Times.nanos(client.timeout());
    if (place == Place.NOWHERE || tired && !patient || !core.allows(Repeat.HARMLESS, trouble, attempt, patient)) {
      finish(trouble.ofRead());
      return;
    }
    pausedUntil = now + pause;
    options.interrupted().accept(trouble.ofRead().exception());
    core.nodes.hasten();
  }
}
