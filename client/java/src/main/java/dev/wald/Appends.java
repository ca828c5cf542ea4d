package dev.wald;

import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.MessageLite;
import dev.wald.v1.AppendBatchRequest;
import dev.wald.v1.AppendBatchResponse;
import dev.wald.v1.AppendRequest;
import dev.wald.v1.AppendResponse;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.Context;
import io.grpc.Contexts;
import io.grpc.Deadline;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.Consumer;
import java.util.function.Function;
import java.util.function.Predicate;

/**
 * The appends of a client. They share one stream to the current server, as independent requests; each attempt of an append is one request.
 * Large requests are calls of their own, and so are all appends of a client whose interceptors must see each, or that does not share.
 */
final class Appends {
  /** Maximum size of a request on the stream. Larger ones would hold up small ones, and the server's limit may be low. */
  static final int MAX_BYTES = 64 << 10;
  /** The time for which a server that does not take such a stream, or ended one for a bad request, gets calls only. */
  private static final long CALLS_ONLY_NANOS = TimeUnit.SECONDS.toNanos(60);
  /** Maximum time that a close waits for the server to end a stream whose requests are all answered. */
  private static final long STREAM_END_NANOS = TimeUnit.SECONDS.toNanos(1);

  private final Core core;
  private final boolean shares;
  private final ReentrantLock lock = new ReentrantLock();
  /** The stream opened last; null: none. */
  AppendStream stream;
  /** Servers that get calls only, and the end of that time. */
  private final Map<String, Long> callsOnly = new ConcurrentHashMap<>();

  Appends(Core core) {
    this.core = core;
    this.shares = core.settings.shareAppends && core.settings.interceptors.isEmpty();
  }

  AppendResponse append(Repeat repeat, Duration timeout, AppendRequest request) {
    return append(repeat, timeout, WalServiceGrpc.getAppendMethod(), request, content -> content.setAppend(request),
        AppendSessionResponse::hasAppendAck, AppendSessionResponse::getAppendAck);
  }

  AppendBatchResponse appendBatch(Repeat repeat, Duration timeout, AppendBatchRequest request) {
    return append(repeat, timeout, WalServiceGrpc.getAppendBatchMethod(), request, content -> content.setBatch(request),
        AppendSessionResponse::hasAck, AppendSessionResponse::getAck);
  }

  private <Q extends MessageLite, A> A append(Repeat repeat, Duration timeout, MethodDescriptor<Q, A> method, Q request,
      Consumer<AppendSessionRequest.Builder> put, Predicate<AppendSessionResponse> acks, Function<AppendSessionResponse, A> ack) {
    CallKind kind = CallKind.writing(repeat);
    if (!shares || request.getSerializedSize() > MAX_BYTES) {
      return core.call(kind, timeout, method, request);
    }
    AppendSessionRequest.Builder content = AppendSessionRequest.newBuilder().setIndependent(true);
    put.accept(content);
    return core.call(kind, timeout, (attempt, deadline) -> {
      if (takesCallsOnly(core.nodes.current())) {
        return core.unary(method, request, attempt, deadline);
      }
      AppendSessionResponse answer;
      try {
        answer = exchange(content, attempt, deadline);
      } catch (StatusRuntimeException end) {
        if (!mustBeCall(end, attempt)) {
          throw end;
        }
        attempt.sent = false;
        return core.unary(method, request, attempt, deadline);
      }
      if (acks.test(answer)) {
        return ack.apply(answer);
      }
      throw refusal(answer);
    });
  }

  /** The error of a request, as the call of its own would have got it. */
  private static RuntimeException refusal(AppendSessionResponse answer) {
    try {
      if (!answer.getError().isEmpty()) {
        return StatusProto.toStatusRuntimeException(com.google.rpc.Status.parseFrom(answer.getError()));
      }
    } catch (InvalidProtocolBufferException | IllegalArgumentException damaged) {
      return Failure.brokenContract("a readable AppendSessionResponse.error").exception();
    }
    return Failure.brokenContract("AppendSessionResponse.ack").exception();
  }

  /** Sends a request on the stream and waits for its answer. */
  private AppendSessionResponse exchange(AppendSessionRequest.Builder content, Attempt attempt, Deadline deadline) {
    if (deadline.isExpired()) {
      throw Status.DEADLINE_EXCEEDED.asRuntimeException();
    }
    AppendStream.Request request = new AppendStream.Request(content, attempt);
    AppendStream open = send(request);
    Context scope = Context.current();
    Context.CancellationListener cancelled =
        ended -> request.answer.completeExceptionally(Contexts.statusFromCancelled(ended).asRuntimeException());
    scope.addListener(cancelled, Runnable::run);
    try {
      return request.answer.get(deadline.timeRemaining(TimeUnit.NANOSECONDS), TimeUnit.NANOSECONDS);
    } catch (TimeoutException late) {
      throw Status.DEADLINE_EXCEEDED.asRuntimeException();
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Status.CANCELLED.withDescription("the thread was interrupted").asRuntimeException();
    } catch (ExecutionException failed) {
      throw (StatusRuntimeException) failed.getCause();
    } finally {
      scope.removeListener(cancelled);
      open.forget(request);
    }
  }

  /**
   * Whether the stream ended because of one request, perhaps of another caller: a message that cannot be read, or an older server, which
   * does not know independent requests. Nothing of the unanswered ones was applied, so that each is sent again, as a call that gets its own
   * answer.
   */
  private boolean mustBeCall(StatusRuntimeException end, Attempt attempt) {
    Failure failure = Failure.of(end.getStatus(), end.getTrailers(), attempt.sent, false);
    boolean one = switch (failure.code) {
      case INVALID_ARGUMENT, UNIMPLEMENTED -> true;
      case UNAVAILABLE, UNAUTHENTICATED -> false;
      default -> failure.failingRequest().isPresent();
    };
    if (one) {
      callsOnly.put(attempt.at.target, System.nanoTime() + CALLS_ONLY_NANOS);
    }
    return one && failure.outcome == Outcome.NOT_APPLIED;
  }

  private boolean takesCallsOnly(Nodes.Node server) {
    Long until = callsOnly.get(server.target);
    if (until == null) {
      return false;
    }
    if (System.nanoTime() - until < 0) {
      return true;
    }
    callsOnly.remove(server.target, until);
    return false;
  }

  /** Sends a request on the stream to the current server. Opens one if there is none; an earlier one still delivers its answers. */
  private AppendStream send(AppendStream.Request request) {
    String token = core.settings.token == null ? null : core.settings.token.current();
    AppendStream before;
    AppendStream opened = null;
    lock.lock();
    try {
      before = stream;
      if (before == null || !before.add(request, core.nodes.current(), token)) {
        opened = new AppendStream(core.nodes);
        // Added before the start, so that a stream that fails at once fails this attempt.
        opened.add(request, core.nodes.current(), token);
        stream = opened;
      }
    } finally {
      lock.unlock();
    }
    if (opened == null) {
      before.write();
      return before;
    }
    if (before != null) {
      before.leave();
    }
    opened.start();
    return opened;
  }

  /** Ends the stream, whose requests are all answered. */
  void close() throws InterruptedException {
    AppendStream last;
    lock.lock();
    try {
      last = stream;
    } finally {
      lock.unlock();
    }
    if (last != null) {
      last.leave();
      last.awaitEnd(STREAM_END_NANOS);
    }
  }
}
