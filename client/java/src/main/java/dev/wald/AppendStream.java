package dev.wald;

import com.google.common.util.concurrent.MoreExecutors;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.ReentrantLock;

/**
 * A stream to one server that carries appends of many threads. Each request has a number of its own, and the server answers each when it
 * is due, in any order:
 *
 * <pre>
 * add ──▶ waiting ──write──▶ sent ──▶ the answer of its number
 *            │                │
 *            └── forgotten ───┘  deadline, interrupt, cancelled scope: a late answer finds no request
 * </pre>
 *
 * <p>The thread that adds a request also writes all that wait, unless another thread writes already. The transport sends messages that are
 * written in a short time together. Answers come on the transport's thread, which only hands them to the waiting threads.
 */
final class AppendStream extends ClientCall.Listener<AppendSessionResponse> {
  /** Time without requests after which the stream is half-closed; after twice this time it is cancelled if the server has not ended it. */
  static final long IDLE_NANOS = TimeUnit.SECONDS.toNanos(1);
  /** Time without an answer after which the stream takes no more requests once a caller gives up. */
  static final long SILENCE_NANOS = TimeUnit.SECONDS.toNanos(5);
  /** The transport hands over every answer as soon as it comes: a thread waits for each. */
  private static final int ALL_ANSWERS = Integer.MAX_VALUE;

  private final Attempt attempt = new Attempt();
  private final ClientCall<AppendSessionRequest, AppendSessionResponse> call;
  private final CountDownLatch ended = new CountDownLatch(1);

  private final ReentrantLock lock = new ReentrantLock();
  /** Requests that the transport does not have yet, in order. */
  private final Map<Long, Request> waiting = new LinkedHashMap<>();
  private final Map<Long, Request> sent = new HashMap<>();
  private long nextId;
  /** A connection has taken the stream. */
  private boolean ready;
  /** Number of the connection that has taken the stream. */
  private int connection;
  /** A thread writes. */
  private boolean writing;
  /** The stream takes no more requests. */
  private boolean closing;
  private boolean halfClosed;
  /** Null: the stream has not ended. */
  private StatusRuntimeException end;
  /** A request was sent, and no answer came since. */
  private boolean silent;
  /** When the first request since the last answer was sent. */
  long silentSince;
  /** A timer looks after the idle stream. */
  private boolean timed;
  private long idleSince;

  /** One attempt of an append. */
  static final class Request {
    final CompletableFuture<AppendSessionResponse> answer = new CompletableFuture<>();
    private final AppendSessionRequest.Builder content;
    private final Attempt attempt;
    /** Set when a stream has taken the request. */
    private AppendSessionRequest message;

    /** {@code attempt} gets the server and the token of the stream, and notes whether the transport has the request. */
    Request(AppendSessionRequest.Builder content, Attempt attempt) {
      this.content = content;
      this.attempt = attempt;
    }
  }

  AppendStream(Nodes nodes) {
    call = nodes.newCall(WalServiceGrpc.getAppendSessionMethod(),
        attempt.options().withOnReadyThreshold(Session.READY_BYTES).withExecutor(MoreExecutors.directExecutor()));
  }

  /** Opens the stream. Requests are added before, too, and share its failure. */
  void start() {
    try {
      // The stream outlives the scope and the deadline of its first caller.
      Context.ROOT.run(() -> call.start(this, new Metadata()));
      call.request(ALL_ANSWERS);
    } catch (RuntimeException failure) {
      onClose(Status.UNKNOWN.withDescription("the stream could not be opened").withCause(failure), new Metadata());
    }
  }

  /**
   * Queues a request; {@link #write} sends it. False: the stream takes no more, or a new call would go to another server, on another
   * connection or with another token.
   *
   * @param token of new calls; null: none
   */
  boolean add(Request request, Nodes.Node server, String token) {
    lock.lock();
    try {
      boolean elsewhere = attempt.at != null && attempt.at != server || ready && connection != server.connection();
      boolean renewed = attempt.token != null && !attempt.token.equals(token);
      if (closing || end != null || elsewhere || renewed) {
        return false;
      }
      request.message = request.content.setRequestId(nextId).build();
      waiting.put(nextId++, request);
      return true;
    } finally {
      lock.unlock();
    }
  }

  /**
   * Ends a request, whose caller waits no more: notes its server and token. A late answer is ignored. A silent stream takes no more
   * requests then: it may end at a proxy whose server is gone, and another stream may reach the next server. Requests that wait keep
   * waiting: the server may only be slow.
   */
  void forget(Request request) {
    boolean gone = false;
    lock.lock();
    try {
      request.attempt.at = attempt.at;
      request.attempt.token = attempt.token;
      long id = request.message.getRequestId();
      if (waiting.remove(id, request) || sent.remove(id, request)) {
        gone = silent && System.nanoTime() - silentSince >= SILENCE_NANOS;
        rest();
      }
    } finally {
      lock.unlock();
    }
    if (gone) {
      leave();
    }
  }

  /** Takes no more requests. The stream ends once the server has answered the present ones. */
  void leave() {
    lock.lock();
    try {
      if (!closing) {
        closing = true;
        rest();
      }
    } finally {
      lock.unlock();
    }
    write();
  }

  /** Waits for the end of the stream. */
  void awaitEnd(long nanos) throws InterruptedException {
    ended.await(nanos, TimeUnit.NANOSECONDS);
  }

  /** Brings waiting requests onto the stream, as far as it is ready. One thread writes, and holds no lock meanwhile. */
  void write() {
    lock.lock();
    try {
      if (writing) {
        return;
      }
      writing = true;
      try {
        writeWaiting();
      } finally {
        writing = false;
      }
    } finally {
      lock.unlock();
    }
  }

  /** The caller has the lock, which is free while a message is written. */
  private void writeWaiting() {
    while (ready && end == null && !waiting.isEmpty() && call.isReady()) {
      Iterator<Request> first = waiting.values().iterator();
      Request request = first.next();
      first.remove();
      request.attempt.sent = true;
      sent.put(request.message.getRequestId(), request);
      if (!silent) {
        silent = true;
        silentSince = System.nanoTime();
      }
      lock.unlock();
      try {
        call.sendMessage(request.message);
      } catch (RuntimeException failed) {
        // The call is cancelled, or is now. Its end comes, and fails every request.
        call.cancel("a request could not be sent", failed);
        continue;
      } finally {
        lock.lock();
      }
    }
    if (closing && ready && !halfClosed && end == null && waiting.isEmpty()) {
      halfClosed = true;
      call.halfClose();
    }
  }

  /** Begins an idle time if there are no requests. The caller has the lock. */
  private void rest() {
    if (end == null && waiting.isEmpty() && sent.isEmpty()) {
      idleSince = System.nanoTime();
      if (!timed) {
        timed = true;
        Timer.after(IDLE_NANOS, this::endIdle);
      }
    }
  }

  /** Ends a stream that has been idle for long enough. */
  private void endIdle() {
    lock.lock();
    try {
      timed = false;
      if (end != null || !waiting.isEmpty() || !sent.isEmpty()) {
        return;
      }
      long left = idleSince + IDLE_NANOS - System.nanoTime();
      if (left > 0) {
        timed = true;
        Timer.after(left, this::endIdle);
        return;
      }
      if (closing) {
        call.cancel("the server does not end the stream", null);
        return;
      }
    } finally {
      lock.unlock();
    }
    leave();
  }

  @Override
  public void onReady() {
    lock.lock();
    try {
      if (!ready) {
        ready = true;
        connection = attempt.at.connection();
      }
    } finally {
      lock.unlock();
    }
    write();
  }

  @Override
  public void onMessage(AppendSessionResponse answer) {
    Request request;
    lock.lock();
    try {
      request = sent.remove(answer.getRequestId());
      silent = false;
      rest();
    } finally {
      lock.unlock();
    }
    if (request != null) {
      request.answer.complete(answer);
    }
  }

  /** Gives every unanswered request the status. */
  @Override
  public void onClose(Status status, Metadata trailers) {
    Status failure = status.isOk() ? Status.UNAVAILABLE.withDescription("the server ended the stream") : status;
    List<Request> unanswered = new ArrayList<>();
    lock.lock();
    try {
      end = failure.asRuntimeException(trailers);
      unanswered.addAll(sent.values());
      unanswered.addAll(waiting.values());
      sent.clear();
      waiting.clear();
    } finally {
      lock.unlock();
    }
    ended.countDown();
    unanswered.forEach(request -> request.answer.completeExceptionally(end));
  }
}
