package dev.wald;

import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/** The connection of a client, its calls, and its end. */
final class Core {
  final Settings settings;
  final Nodes nodes;
  final Appends appends;
  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  /** Calls that the close waits for. */
  private int underway;
  private volatile boolean closed;
  /** Ends of the calls that end with the client: reads, scans, sessions, producers. */
  private final Set<Runnable> ends = new HashSet<>();

  Core(Settings settings, List<String> targets) {
    this.settings = settings;
    this.nodes = new Nodes(targets, settings);
    this.appends = new Appends(this);
  }

  boolean isClosed() {
    return closed;
  }

  /** Ends with the client, unless {@link #forget} comes before. Fails if the client is closed. */
  void endWithClient(Runnable end) {
    lock.lock();
    try {
      if (closed) {
        throw Failure.closed("the client").exception();
      }
      ends.add(end);
    } finally {
      lock.unlock();
    }
  }

  void forget(Runnable end) {
    lock.lock();
    try {
      ends.remove(end);
    } finally {
      lock.unlock();
    }
  }

  private void begin() {
    lock.lock();
    try {
      if (closed) {
        throw Failure.closed("the client").exception();
      }
      underway++;
    } finally {
      lock.unlock();
    }
  }

  private void end() {
    lock.lock();
    try {
      underway--;
      changed.signalAll();
    } finally {
      lock.unlock();
    }
  }

  /** Ends reads, scans, sessions and producers, waits for the other calls, and closes the connection. */
  void close() {
    List<Runnable> now;
    lock.lock();
    try {
      if (closed) {
        return;
      }
      closed = true;
      changed.signalAll();
      now = new ArrayList<>(ends);
    } finally {
      lock.unlock();
    }
    now.forEach(Runnable::run);
    try {
      awaitCalls();
      appends.close();
    } catch (InterruptedException interrupted) {
      // The calls underway end at once.
      Thread.currentThread().interrupt();
    }
    nodes.close();
  }

  private void awaitCalls() throws InterruptedException {
    lock.lock();
    try {
      while (underway > 0) {
        changed.await();
      }
    } finally {
      lock.unlock();
    }
  }

  /** One attempt of a call: returns the answer, or throws the status of the refusal. */
  interface Exchange<A> {
    A run(Attempt attempt, Deadline deadline);
  }

  /** Makes a unary call, and repeats it as far as that is safe and the timeout reaches. */
  <Q, A> A call(CallKind kind, Duration timeout, MethodDescriptor<Q, A> method, Q request) {
    return call(kind, timeout, (attempt, deadline) -> unary(method, request, attempt, deadline));
  }

  /** One attempt, as a unary call. */
  <Q, A> A unary(MethodDescriptor<Q, A> method, Q request, Attempt attempt, Deadline deadline) {
    return ClientCalls.blockingUnaryCall(nodes, method, attempt.options().withDeadline(deadline), request);
  }

  /** Makes a call, and repeats it as far as that is safe and the timeout reaches. */
  <A> A call(CallKind kind, Duration timeout, Exchange<A> exchange) {
    begin();
    Context.CancellableContext scope = Context.current().withCancellation();
    Runnable cancel = () -> scope.cancel(null);
    try {
      if (kind.reads()) {
        endWithClient(cancel);
      }
      return repeat(kind, scope, deadline(kind, timeout), exchange);
    } finally {
      forget(cancel);
      scope.cancel(null);
      end();
    }
  }

  private static Deadline deadline(CallKind kind, Duration timeout) {
    Deadline deadline = Deadline.after(Math.min(Times.nanos(timeout) + Times.nanos(kind.extra()), Long.MAX_VALUE / 2), TimeUnit.NANOSECONDS);
    Deadline outer = Context.current().getDeadline();
    return outer == null ? deadline : deadline.minimum(outer);
  }

  private <A> A repeat(CallKind kind, Context scope, Deadline deadline, Exchange<A> exchange) {
    Pauses pauses = new Pauses(kind.patient() ? settings.retry.patient() : settings.retry);
    boolean unknown = false;
    for (;;) {
      Attempt attempt = new Attempt();
      Failure failure;
      Context before = scope.attach();
      try {
        return exchange.run(attempt, deadline);
      } catch (StatusRuntimeException refused) {
        boolean givenUp = scope.isCancelled() || Thread.currentThread().isInterrupted();
        failure = readFailure(refused.getStatus(), refused.getTrailers(), attempt, attempt.sent, givenUp);
      } finally {
        scope.detach(before);
      }
      long pause = pauses.next(failure, attempt);
      boolean last = !allows(kind.repeat(), failure, attempt, false) || pauses.exhausted() || deadline.timeRemaining(TimeUnit.NANOSECONDS) < pause;
      if (!last) {
        unknown |= failure.outcome == Outcome.UNKNOWN;
        last = !sleep(pause, kind.reads());
      }
      if (last) {
        failure = kind.reads() && closed && failure.kind == FailureKind.CANCELLED ? Failure.closed("the client") : failure;
        failure = unknown ? failure.afterUnknown() : failure;
        throw (kind.reads() ? failure.ofRead() : failure).exception();
      }
    }
  }

  /** Pauses before the next attempt, while the transport tries to connect. False: the thread was interrupted, or a read's client closed. */
  boolean sleep(long nanos, boolean endsWithClient) {
    nodes.hasten();
    lock.lock();
    try {
      long left = nanos;
      while (left > 0) {
        if (endsWithClient && closed) {
          return false;
        }
        left = changed.awaitNanos(left);
      }
      return !Thread.interrupted() || reinterrupt();
    } catch (InterruptedException interrupted) {
      return reinterrupt();
    } finally {
      lock.unlock();
    }
  }

  private static boolean reinterrupt() {
    Thread.currentThread().interrupt();
    return false;
  }

  /**
   * Whether to send a request again after this failure of an attempt. A server that refused the token applied nothing: the request is
   * sent again once there is another token. {@code waits}: producers and followers also wait until an expired one is replaced in its
   * file.
   */
  boolean allows(Repeat repeat, Failure failure, Attempt attempt, boolean waits) {
    return switch (failure.reason) {
      case BAD_CREDENTIAL -> isRenewed(attempt);
      case CREDENTIAL_EXPIRED -> isRenewed(attempt) || waits && settings.token != null && !settings.token.isFixed();
      default -> repeat.allows(failure);
    };
  }

  /** Whether there is another token than that of a failed attempt. */
  private boolean isRenewed(Attempt attempt) {
    return settings.token != null && attempt.token != null && settings.token.changed(attempt.token);
  }

  /** Reads the failure of an attempt, knows the failures of TLS, and chooses the server of the next attempt. */
  Failure readFailure(Status status, Metadata trailers, Attempt attempt, boolean sent, boolean givenUp) {
    Failure failure = Failure.of(status, trailers, sent, givenUp);
    if (failure.kind == FailureKind.NOT_SENT) {
      TlsProblem problem = TlsProblem.of(status.getCause(), settings.tls != null);
      if (problem != null) {
        settings.lastTls.set(problem);
        failure = problem.asFailure();
      }
    }
    return nodes.failedAt(attempt, failure);
  }
}
