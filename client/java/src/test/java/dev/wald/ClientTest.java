package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import dev.wald.v1.AppendResponse;
import dev.wald.v1.GetTailResponse;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Function;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class ClientTest {
  private static final StatusRuntimeException BUSY =
      Fake.refusal(Code.RESOURCE_EXHAUSTED, Reason.BUSY, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE));
  private static final StatusRuntimeException MISMATCH =
      Fake.refusal(Code.FAILED_PRECONDITION, Reason.POSITION_MISMATCH, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER));
  private static final AppendOptions GUARDED = AppendOptions.DEFAULT.expectLsn(7);

  /** Answers the appends in turn with these errors, then with acks. A null loses the connection instead of answering. */
  private static AtomicInteger failing(Fake fake, StatusRuntimeException... errors) {
    AtomicInteger calls = new AtomicInteger();
    fake.append = request -> {
      int call = calls.getAndIncrement();
      if (call >= errors.length) {
        return AppendResponse.newBuilder().setLsn(7).build();
      }
      if (errors[call] == null) {
        fake.drop();
        throw Status.INTERNAL.asRuntimeException();
      }
      throw errors[call];
    };
    return calls;
  }

  @Test
  void plainAppendWhoseConnectionBreaksIsNotRepeated() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      AtomicInteger calls = failing(fake, (StatusRuntimeException) null);
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(FailureKind.CONNECTION_LOST, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      assertEquals(Retry.SAFE_WITH_CONDITION, failure.retry());
      assertEquals(1, calls.get());
    }
  }

  @Test
  void plainAppendThatWasNotAppliedIsRepeated() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      AtomicInteger calls = failing(fake, Fake.refusal(Code.UNAVAILABLE, Reason.STARTING, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE)), BUSY);
      assertEquals(7, client.append("a", "x").lsn());
      assertEquals(3, calls.get());
    }
  }

  @Test
  void guardedAppendIsRepeatedAfterALostConnection() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      AtomicInteger calls = failing(fake, null,
          Fake.refusal(Code.INTERNAL, Reason.JOURNAL_FAILED, Fake.stated(Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)));
      assertEquals(7, client.append("a", NewRecord.of("x"), GUARDED).lsn());
      assertEquals(3, calls.get());
    }
  }

  @Test
  void mismatchAfterALostConnectionMayBeTheEchoOfASuccess() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      failing(fake, null, MISMATCH);
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", NewRecord.of("x"), GUARDED));
      assertEquals(Reason.POSITION_MISMATCH, failure.reason());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
    }
  }

  @Test
  void mismatchAtOnceIsNotApplied() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      failing(fake, BUSY, MISMATCH);
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", NewRecord.of("x"), GUARDED));
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
      assertEquals(Retry.NEVER, failure.retry());
    }
  }

  @Test
  void attemptsAreCounted() throws Exception {
    RetryPolicy three = new RetryPolicy(3, Duration.ofMillis(1), Duration.ofMillis(1));
    try (Fake fake = new Fake(); WaldClient client = fake.builder().retry(three).build()) {
      AtomicInteger calls = failing(fake, BUSY, BUSY, BUSY, BUSY);
      assertEquals(Reason.BUSY, assertThrows(WaldException.class, () -> client.append("a", "x")).reason());
      assertEquals(3, calls.get());
    }
  }

  @Test
  void noAttemptBeginsThatTheDeadlineWouldCutOff() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.builder().retry(Fake.NO_PAUSES).build()) {
      AtomicInteger calls = failing(fake, BUSY);
      assertEquals(Reason.BUSY, assertThrows(WaldException.class, () -> client.append("a", "x")).reason());
      assertEquals(1, calls.get());
    }
  }

  @Test
  void appendToNobodyIsNotApplied() throws Exception {
    int port;
    try (ServerSocket socket = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      port = socket.getLocalPort();
    }
    try (WaldClient client = WaldClient.builder("127.0.0.1:" + port).retry(Fake.QUICK).build()) {
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(FailureKind.NOT_SENT, failure.kind());
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
      assertEquals(Retry.SAFE, failure.retry());
    }
  }

  @Test
  void serverThatSaysNothingCountsAsUnreached() throws Exception {
    // Takes connections, and never answers.
    try (ServerSocket silent = new ServerSocket(0, 9, InetAddress.getLoopbackAddress());
        WaldClient client = WaldClient.builder("127.0.0.1:" + silent.getLocalPort())
            .connectTimeout(Duration.ofMillis(50)).retry(RetryPolicy.NONE).build()) {
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(FailureKind.NOT_SENT, failure.kind());
      assertTrue(failure.getMessage().contains("no connection within"), failure.getMessage());
    }
  }

  @Test
  void readIsRepeatedAfterALostConnection() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      AtomicInteger calls = new AtomicInteger();
      fake.tail = request -> {
        if (calls.incrementAndGet() == 1) {
          fake.drop();
        }
        return GetTailResponse.newBuilder().setFirstLsn(0).setTailLsn(5).build();
      };
      assertEquals(5, client.tail("a").tailLsn());
      assertEquals(2, calls.get());
    }
  }

  /** Loses the connection with the first answer of a script, and counts its calls. */
  private static <Q, A> Function<Q, A> losingFirst(Fake fake, AtomicInteger calls, Function<Q, A> script) {
    return request -> {
      if (calls.incrementAndGet() == 1) {
        fake.drop();
      }
      return script.apply(request);
    };
  }

  /** The write is repeated after a lost answer, or its outcome is unknown. */
  private static void assertRepeated(boolean repeated, Runnable write, AtomicInteger calls) {
    if (repeated) {
      write.run();
    } else {
      WaldException failure = assertThrows(WaldException.class, write::run);
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      assertEquals(Retry.SAFE_WITH_CONDITION, failure.retry());
    }
    assertEquals(repeated ? 2 : 1, calls.get());
  }

  @Test
  void cursorCommitIsRepeatedOnlyIfTheCursorMovesOn() throws Exception {
    CursorCommit plain = CursorCommit.of("a", "c", 4);
    for (var test : Map.of(plain, false, plain.expectLsn(4), false, plain.expectLsn(3), true).entrySet()) {
      try (Fake fake = new Fake(); WaldClient client = fake.client()) {
        AtomicInteger calls = new AtomicInteger();
        fake.commit = losingFirst(fake, calls, fake.commit);
        assertRepeated(test.getValue(), () -> client.commitCursor(test.getKey()), calls);
      }
    }
  }

  @Test
  void fenceIsRepeatedOnlyWithAnEpochOrALogId() throws Exception {
    FenceOptions any = FenceOptions.DEFAULT;
    for (var test : Map.of(any, false, any.logId(9), true, any.writerEpoch(3), true, any.writerEpoch(3).logId(9), true).entrySet()) {
      try (Fake fake = new Fake(); WaldClient client = fake.client()) {
        AtomicInteger calls = new AtomicInteger();
        fake.fence = losingFirst(fake, calls, fake.fence);
        assertRepeated(test.getValue(), () -> client.fence("a", test.getKey()), calls);
      }
    }
  }

  @Test
  void closedClientSaysSo() throws Exception {
    try (Fake fake = new Fake()) {
      WaldClient client = fake.client();
      client.close();
      for (Runnable call : List.<Runnable>of(() -> client.append("a", "x"), client::session, () -> client.follow("a"), () -> client.producer("a"))) {
        assertEquals(FailureKind.CLOSED, assertThrows(WaldException.class, call::run).kind());
      }
    }
  }

  @Test
  void closeWaitsForAppendsUnderWayAndEndsReads() throws Exception {
    CountDownLatch arrived = new CountDownLatch(2);
    CountDownLatch answer = new CountDownLatch(1);
    try (Fake fake = new Fake()) {
      fake.append = request -> {
        arrived.countDown();
        await(answer);
        return AppendResponse.newBuilder().setLsn(7).build();
      };
      fake.tail = request -> {
        arrived.countDown();
        await(answer);
        return GetTailResponse.getDefaultInstance();
      };
      WaldClient client = fake.client();
      CompletableFuture<Ack> append = CompletableFuture.supplyAsync(() -> client.append("a", "x"));
      CompletableFuture<TailInfo> read = CompletableFuture.supplyAsync(() -> client.tail("a"));
      await(arrived);
      CompletableFuture<Void> closing = CompletableFuture.runAsync(client::close);
      Throwable ended = assertThrows(Exception.class, () -> read.get(10, TimeUnit.SECONDS)).getCause();
      assertEquals(FailureKind.CLOSED, ((WaldException) ended).kind());
      answer.countDown();
      assertEquals(7, append.get(10, TimeUnit.SECONDS).lsn());
      closing.get(10, TimeUnit.SECONDS);
    }
  }

  @Test
  void interruptGivesACallUp() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    CountDownLatch answer = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        arrived.countDown();
        await(answer);
        return AppendResponse.newBuilder().setLsn(7).build();
      };
      CompletableFuture<WaldException> failure = new CompletableFuture<>();
      Thread thread = new Thread(() -> {
        WaldException failed = assertThrows(WaldException.class, () -> client.append("a", "x"));
        assertTrue(Thread.currentThread().isInterrupted());
        failure.complete(failed);
      });
      thread.start();
      await(arrived);
      thread.interrupt();
      assertEquals(FailureKind.CANCELLED, failure.get(10, TimeUnit.SECONDS).kind());
      assertEquals(Outcome.UNKNOWN, failure.get().outcome());
      answer.countDown();
    }
  }

  @Test
  void interceptorsSeeEachAttempt() throws Exception {
    List<String> methods = new CopyOnWriteArrayList<>();
    ClientInterceptor tracing = new ClientInterceptor() {
      @Override
      public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
        methods.add(method.getBareMethodName());
        return next.newCall(method, options);
      }
    };
    try (Fake fake = new Fake(); WaldClient client = fake.builder().intercept(tracing).build()) {
      failing(fake, BUSY);
      client.append("a", "x");
      assertEquals(List.of("Append", "Append"), methods);
    }
  }

  static void await(CountDownLatch latch) {
    try {
      assertTrue(latch.await(10, TimeUnit.SECONDS));
    } catch (InterruptedException interrupted) {
      throw new IllegalStateException(interrupted);
    }
  }
}
