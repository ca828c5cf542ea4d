package dev.wald;

import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Sends batches without waiting for acks. They are applied and acked in the order of {@link #send}. A session ends at the first failure:
 * earlier batches keep their acks, the failing batch gets its error, and no later batch is applied (unless the failure's own outcome is
 * unknown; then later outcomes are unknown as well). A session does not repeat anything; a {@link Producer} does.
 *
 * <p>Many threads may use a session at once. Continuations of its futures must not block: use their {@code Async} forms.
 */
public final class Session implements AutoCloseable {
  /** Maximum bytes that are sent and not acked, unless the program names another: 8 MiB. */
  public static final int DEFAULT_WINDOW_BYTES = 8 << 20;
  /** Bytes that gRPC takes before it reports that it is not ready. */
  static final int READY_BYTES = 256 << 10;

  private final Core core;
  private final int windowBytes;
  private final Runnable cancel = this::cancelCall;

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  private ClientCall<AppendSessionRequest, AppendSessionResponse> call;
  private Attempt attempt;
  /** The stream is open: a connection has taken it. */
  private boolean ready;
  /** Not acked, in order. */
  private final Deque<Request> unacked = new ArrayDeque<>();
  /** The end of {@code unacked} that is not sent yet. */
  private final Deque<Request> unsent = new ArrayDeque<>();
  private long bytes;
  private long nextId;
  private boolean closing;
  private boolean halfClosed;
  private boolean cancelled;
  private boolean done;
  /** Null: it has not failed. */
  private Failure failure;

  private record Request(AppendSessionRequest message, int bytes, CompletableFuture<BatchAck> answer) {}

  Session(Core core, int windowBytes) {
    this.core = core;
    this.windowBytes = windowBytes;
    core.endWithClient(cancel);
    open();
  }

  /** Opens the stream. Nothing was appended yet, so that any failure to open it may be repeated. */
  private void open() {
    Pauses pauses = new Pauses(core.settings.retry);
    for (;;) {
      Answers answers = new Answers(new Attempt());
      answers.start();
      Failure trouble = answers.awaitReady();
      if (trouble == null) {
        return;
      }
      long pause = pauses.next(trouble, answers.attempt);
      boolean last = !core.allows(Repeat.HARMFUL, trouble, answers.attempt, false) || pauses.exhausted();
      if (last || !core.sleep(pause, true)) {
        core.forget(cancel);
        throw (core.isClosed() ? Failure.closed("the client") : trouble).exception();
      }
    }
  }

  /**
   * Queues a batch and returns at once, unless the window is full: then it blocks. The future gets the ack, or a {@link WaldException}. A
   * future that the program cancels takes nothing back.
   *
   * @throws WaldException the session has failed or was closed, or the thread was interrupted; nothing was sent
   */
  public CompletableFuture<BatchAck> send(Batch batch) {
    AppendSessionRequest.Builder message = AppendSessionRequest.newBuilder().setBatch(batch.proto());
    int size = message.getBatch().getSerializedSize();
    lock.lock();
    try {
      while (bytes > 0 && bytes + size > windowBytes && failure == null && !closing) {
        changed.await();
      }
      if (failure != null) {
        throw Failure.earlier(failure, false).exception();
      }
      if (closing) {
        throw Failure.closed("the session").exception();
      }
      Request request = new Request(message.setRequestId(nextId++).build(), size, new CompletableFuture<>());
      unacked.add(request);
      unsent.add(request);
      bytes += size;
      pump();
      return request.answer;
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Failure.givenUp(false).exception();
    } finally {
      lock.unlock();
    }
  }

  /**
   * Waits until everything is acked, and ends the session.
   *
   * @throws WaldException the first failure of the session; or the thread was interrupted, and the session goes on
   */
  @Override
  public void close() {
    lock.lock();
    try {
      closing = true;
      changed.signalAll();
      pump();
      while (!done) {
        changed.await();
      }
      if (failure != null) {
        throw failure.exception();
      }
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Failure.givenUp(true).exception();
    } finally {
      lock.unlock();
    }
  }

  /** Ends the session now. The outcome of batches that were sent and not acked is unknown. */
  public void cancel() {
    cancelCall();
  }

  private void cancelCall() {
    ClientCall<AppendSessionRequest, AppendSessionResponse> open;
    lock.lock();
    try {
      cancelled = true;
      open = call;
    } finally {
      lock.unlock();
    }
    if (open != null) {
      open.cancel("the session was cancelled", null);
    }
  }

  /** Brings the queue onto the stream, as far as it is ready. The caller has the lock. */
  private void pump() {
    if (!ready || cancelled || done || halfClosed) {
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

  /** The answers of one stream. */
  private final class Answers extends ClientCall.Listener<AppendSessionResponse> {
    private final Attempt attempt;
    private ClientCall<AppendSessionRequest, AppendSessionResponse> stream;
    /** The failure of a stream that was never ready; null: none. */
    private Failure refused;

    private Answers(Attempt attempt) {
      this.attempt = attempt;
    }

    private void start() {
      stream = core.nodes.newCall(WalServiceGrpc.getAppendSessionMethod(), attempt.options().withOnReadyThreshold(READY_BYTES));
      // A deadline of the caller's scope is not the session's.
      Context.current().fork().run(() -> stream.start(this, new Metadata()));
      stream.request(1);
      lock.lock();
      try {
        // Not before: gRPC may lose a cancellation that comes while the call starts.
        call = stream;
        Session.this.attempt = attempt;
        if (cancelled) {
          stream.cancel("the session was cancelled", null);
        }
      } finally {
        lock.unlock();
      }
    }

    /** Waits until a connection has taken the stream. Null: it has. */
    private Failure awaitReady() {
      lock.lock();
      try {
        while (!ready && refused == null) {
          changed.await();
        }
        return ready ? null : refused;
      } catch (InterruptedException interrupted) {
        Thread.currentThread().interrupt();
        cancelled = true;
        stream.cancel("the thread was interrupted", null);
        return Failure.givenUp(false);
      } finally {
        lock.unlock();
      }
    }

    @Override
    public void onReady() {
      lock.lock();
      try {
        ready = true;
        changed.signalAll();
        pump();
      } finally {
        lock.unlock();
      }
    }

    @Override
    public void onMessage(AppendSessionResponse answer) {
      Request request;
      BatchAck ack;
      lock.lock();
      try {
        if (unacked.size() == unsent.size() || unacked.peek().message.getRequestId() != answer.getRequestId()) {
          throw Failure.brokenContract("the ack of a request in its order").exception();
        }
        ack = Protos.batchAck(answer.getAck());
        request = unacked.poll();
        bytes -= request.bytes;
        changed.signalAll();
      } catch (WaldException broken) {
        fail(broken.failure());
        stream.cancel("the answer breaks the contract", null);
        return;
      } finally {
        lock.unlock();
      }
      stream.request(1);
      request.answer.complete(ack);
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      Failure trouble = status.isOk()
          ? Failure.lost("the server ended the stream", attempt.sent)
          : core.readFailure(status, trailers, attempt, attempt.sent, cancelled);
      lock.lock();
      try {
        if (!ready) {
          refused = trouble;
          changed.signalAll();
          return;
        }
        boolean complete = closing && unacked.isEmpty() && failure == null;
        if (complete && trouble.reason == Reason.NONE) {
          // Nothing is due any more, so nothing can have failed.
          done = true;
          changed.signalAll();
          core.forget(cancel);
          return;
        }
      } finally {
        lock.unlock();
      }
      fail(trouble);
    }
  }

  /** Gives every request that is not acked its error. */
  private void fail(Failure first) {
    List<Runnable> answers = new ArrayList<>();
    lock.lock();
    try {
      done = true;
      changed.signalAll();
      core.forget(cancel);
      if (failure != null) {
        return;
      }
      failure = first;
      OptionalLong failing = first.failingRequest();
      int sent = unacked.size() - unsent.size();
      int index = 0;
      for (Request request : unacked) {
        Failure of = Failure.ofRequest(first, failing, request.message.getRequestId(), index == 0, index < sent);
        answers.add(() -> request.answer.completeExceptionally(of.exception()));
        index++;
      }
      unacked.clear();
      unsent.clear();
      bytes = 0;
    } finally {
      lock.unlock();
    }
    answers.forEach(Runnable::run);
  }
}
