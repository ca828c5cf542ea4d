package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import dev.wald.v1.AppendRequest;
import dev.wald.v1.AppendResponse;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BooleanSupplier;
import java.util.function.Supplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Appends that share a stream. */
@Timeout(60)
class AppendsTest {
  private static final AppendOptions GUARDED = AppendOptions.DEFAULT.expectLsn(7);

  private final ExecutorService threads = Executors.newCachedThreadPool();

  @AfterEach
  void stop() {
    threads.shutdownNow();
  }

  private <A> CompletableFuture<A> start(Supplier<A> call) {
    return CompletableFuture.supplyAsync(call, threads);
  }

  private static WaldException failureOf(CompletableFuture<?> answer) {
    return (WaldException) assertThrows(ExecutionException.class, () -> answer.get(10, TimeUnit.SECONDS)).getCause();
  }

  static void until(BooleanSupplier holds) throws InterruptedException {
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(10);
    while (!holds.getAsBoolean()) {
      assertTrue(System.nanoTime() < end, "not within 10 s");
      Thread.sleep(10);
    }
  }

  private static String textOf(AppendRequest request) {
    return request.getRecord().getData().toStringUtf8();
  }

  /** Answers an append with its text as the lsn. */
  private static AppendResponse echo(AppendRequest request) {
    return AppendResponse.newBuilder().setLsn(Long.parseLong(textOf(request))).build();
  }

  private static StatusRuntimeException fenced() {
    Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
    facts.put("current_epoch", "9");
    com.google.rpc.ErrorInfo info =
        com.google.rpc.ErrorInfo.newBuilder().setDomain("wald.dev").setReason("FENCED").putAllMetadata(facts).build();
    return Fake.status(Code.FAILED_PRECONDITION, info, Fake.failed("FENCED", "a", "of another writer"), Fake.delay(3));
  }

  @Test
  void concurrentAppendsShareOneStream() throws Exception {
    CountDownLatch together = new CountDownLatch(20);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        together.countDown();
        ClientTest.await(together);
        return echo(request);
      };
      List<CompletableFuture<Ack>> acks = new ArrayList<>();
      for (int i = 0; i < 20; i++) {
        String text = String.valueOf(i);
        acks.add(start(() -> client.append("a", text)));
      }
      for (int i = 0; i < 20; i++) {
        assertEquals(i, acks.get(i).get(10, TimeUnit.SECONDS).lsn());
      }
      assertEquals(7, client.appendBatch(Batch.of("a", NewRecord.of("x"))).appends().get(0).firstLsn());
      assertEquals(1, fake.streams.get());
      assertEquals(0, fake.unary.get());
      assertEquals(21, fake.called());
    }
  }

  @Test
  void refusedAppendGetsTheErrorOfACall() throws Exception {
    CountDownLatch refused = new CountDownLatch(1);
    CountDownLatch arrived = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client(); WaldClient calls = fake.builder().shareAppends(false).build()) {
      fake.append = request -> {
        if (textOf(request).equals("no")) {
          throw fenced();
        }
        arrived.countDown();
        ClientTest.await(refused);
        return echo(request);
      };
      fake.appendBatch = request -> {
        throw fenced();
      };
      CompletableFuture<Ack> beside = start(() -> client.append("a", "5"));
      ClientTest.await(arrived);
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "no"));
      WaldException ofBatch = assertThrows(WaldException.class, () -> client.appendBatch(Batch.of("a", NewRecord.of("x"))));
      WaldException ofCall = assertThrows(WaldException.class, () -> calls.append("a", "no"));
      for (WaldException one : List.of(failure, ofBatch)) {
        assertEquals(ofCall.getMessage(), one.getMessage());
        assertEquals(ofCall.kind(), one.kind());
        assertEquals(ofCall.code(), one.code());
        assertEquals(Reason.FENCED, one.reason());
        assertEquals(Outcome.NOT_APPLIED, one.outcome());
        assertEquals(ofCall.retry(), one.retry());
        assertEquals(ofCall.facts(), one.facts());
        assertEquals(ofCall.failedChecks(), one.failedChecks());
        assertEquals(Duration.ofSeconds(3), one.retryAfter().orElseThrow());
      }
      refused.countDown();
      assertEquals(5, beside.get(10, TimeUnit.SECONDS).lsn());
      assertEquals(1, fake.streams.get());
    }
  }

  @Test
  void answersComeInAnyOrder() throws Exception {
    CountDownLatch second = new CountDownLatch(1);
    CountDownLatch arrived = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        if (textOf(request).equals("1")) {
          arrived.countDown();
          ClientTest.await(second);
        }
        return echo(request);
      };
      CompletableFuture<Ack> first = start(() -> client.append("a", "1"));
      ClientTest.await(arrived);
      assertEquals(2, client.append("a", "2").lsn());
      assertFalse(first.isDone());
      second.countDown();
      assertEquals(1, first.get(10, TimeUnit.SECONDS).lsn());
    }
  }

  @Test
  void answerWithoutAckOrErrorBreaksTheContract() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
          stream.send(AppendSessionResponse.newBuilder().setRequestId(request.getRequestId()).build());
        }
      };
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(FailureKind.CONTRACT, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      failure = assertThrows(WaldException.class, () -> client.appendBatch(Batch.of("a", NewRecord.of("x"))));
      assertEquals(FailureKind.CONTRACT, failure.kind());
    }
  }

  @Test
  void brokenStreamIsUnknownAndRepeatsGuardedAppends() throws Exception {
    AtomicInteger arrived = new AtomicInteger();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        if (fake.streams.get() > 1) {
          fake.answerEach(stream);
          return;
        }
        while (arrived.get() < 2) {
          stream.receive();
          arrived.incrementAndGet();
        }
        fake.drop();
      };
      CompletableFuture<Ack> plain = start(() -> client.append("a", "x"));
      CompletableFuture<Ack> guarded = start(() -> client.append("a", NewRecord.of("y"), GUARDED));
      WaldException failure = failureOf(plain);
      assertEquals(FailureKind.CONNECTION_LOST, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      assertEquals(7, guarded.get(10, TimeUnit.SECONDS).lsn());
      assertEquals(2, fake.streams.get());
    }
  }

  @Test
  void appendsOfADrainingServerGoOnANewStream() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        if (fake.streams.get() == 1) {
          AppendSessionRequest first = stream.receive();
          stream.receive();
          stream.send(fake.answerOf(first));
          stream.fail(Fake.refusal(Code.UNAVAILABLE, Reason.DRAINING, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE)));
          return;
        }
        fake.answerEach(stream);
      };
      fake.append = AppendsTest::echo;
      CompletableFuture<Ack> first = start(() -> client.append("a", "1"));
      CompletableFuture<Ack> second = start(() -> client.append("a", "2"));
      assertEquals(1, first.get(10, TimeUnit.SECONDS).lsn());
      assertEquals(2, second.get(10, TimeUnit.SECONDS).lsn());
      assertEquals(2, fake.streams.get());
      assertEquals(0, fake.unary.get());
    }
  }

  @Test
  void streamThatEndsWithoutAStatusIsALostConnection() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        stream.receive();
        stream.end();
      };
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(FailureKind.CONNECTION_LOST, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
    }
  }

  @Test
  void lateAnswerOfATimedOutAppendIsIgnored() throws Exception {
    CountDownLatch late = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        if (textOf(request).equals("1")) {
          ClientTest.await(late);
        }
        return echo(request);
      };
      long began = System.nanoTime();
      WaldException failure = assertThrows(WaldException.class, () -> client.withTimeout(Duration.ofMillis(200)).append("a", "1"));
      assertTrue(System.nanoTime() - began < TimeUnit.SECONDS.toNanos(5));
      assertEquals(FailureKind.TIMEOUT, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      assertEquals(2, client.append("a", "2").lsn());
      late.countDown();
      assertEquals(3, client.append("a", "3").lsn());
      assertEquals(1, fake.streams.get());
    }
  }

  @Test
  void timedOutAppendFreesItsPlace() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        // It never answers.
        while (stream.receive() != null) {
          continue;
        }
      };
      assertThrows(WaldException.class, () -> client.withTimeout(Duration.ofMillis(100)).append("a", "x"));
      // With a request underway it would stay open.
      until(() -> fake.streamsEnded.get() == 1);
    }
  }

  /** Cancels an append that the server has, once its stream has brought no answer for so long. */
  private void giveUp(WaldClient client, CountDownLatch arrived, long silence) throws Exception {
    Context.CancellableContext scope = Context.current().withCancellation();
    CompletableFuture<Ack> answer = start(() -> {
      Context before = scope.attach();
      try {
        return client.append("a", "1");
      } finally {
        scope.detach(before);
      }
    });
    ClientTest.await(arrived);
    client.core().appends.stream.silentSince -= silence;
    scope.cancel(null);
    assertEquals(Outcome.UNKNOWN, failureOf(answer).outcome());
  }

  @Test
  void silentStreamTakesNoMoreAppends() throws Exception {
    CountDownLatch waits = new CountDownLatch(1);
    CountDownLatch arrived = new CountDownLatch(1);
    CountDownLatch late = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        if (!textOf(request).equals("2")) {
          (textOf(request).equals("0") ? waits : arrived).countDown();
          ClientTest.await(late);
        }
        return echo(request);
      };
      CompletableFuture<Ack> waiting = start(() -> client.append("a", "0"));
      ClientTest.await(waits);
      giveUp(client, arrived, AppendStream.SILENCE_NANOS);
      assertEquals(2, client.append("a", "2").lsn());
      assertEquals(2, fake.streams.get());
      // An append that waits keeps its place on the silent stream.
      late.countDown();
      assertEquals(0, waiting.get(10, TimeUnit.SECONDS).lsn());
    }
  }

  @Test
  void streamThatAnswersOtherAppendsStays() throws Exception {
    AtomicReference<CountDownLatch> arrived = new AtomicReference<>();
    CountDownLatch late = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        if (textOf(request).equals("1")) {
          arrived.get().countDown();
          ClientTest.await(late);
        }
        return echo(request);
      };
      for (int i = 0; i < 2; i++) {
        arrived.set(new CountDownLatch(1));
        giveUp(client, arrived.get(), AppendStream.SILENCE_NANOS * 3 / 5);
        // Its answer begins the time again.
        assertEquals(2, client.append("a", "2").lsn());
      }
      assertEquals(1, fake.streams.get());
      late.countDown();
    }
  }

  @Test
  void appendThatNeverLeftTheClientIsNotApplied() throws Exception {
    // Takes connections, and never answers.
    try (ServerSocket silent = new ServerSocket(0, 9, InetAddress.getLoopbackAddress());
        WaldClient client = WaldClient.builder("127.0.0.1:" + silent.getLocalPort()).timeout(Duration.ofMillis(200)).build()) {
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(FailureKind.TIMEOUT, failure.kind());
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
    }
  }

  @Test
  void cancelledScopeGivesAnAppendUp() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        stream.receive();
        arrived.countDown();
        stream.receive();
      };
      Context.CancellableContext scope = Context.current().withCancellation();
      CompletableFuture<Ack> answer = start(() -> {
        Context before = scope.attach();
        try {
          return client.append("a", "x");
        } finally {
          scope.detach(before);
        }
      });
      ClientTest.await(arrived);
      scope.cancel(null);
      WaldException failure = failureOf(answer);
      assertEquals(FailureKind.CANCELLED, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
    }
  }

  @Test
  void badMessageOfOneAppendMakesEachACall() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        stream.receive();
        stream.receive();
        stream.fail(Fake.refusal(Code.INVALID_ARGUMENT, Reason.REQUEST_TOO_LARGE, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER)));
      };
      fake.append = request -> {
        if (textOf(request).equals("bad")) {
          throw Fake.refusal(Code.INVALID_ARGUMENT, Reason.RECORD_TOO_LARGE, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER));
        }
        return echo(request);
      };
      CompletableFuture<Ack> good = start(() -> client.append("a", "1"));
      CompletableFuture<Ack> bad = start(() -> client.append("a", "bad"));
      assertEquals(1, good.get(10, TimeUnit.SECONDS).lsn());
      assertEquals(Reason.RECORD_TOO_LARGE, failureOf(bad).reason());
      assertEquals(2, fake.unary.get());
      // And so for a minute.
      assertEquals(2, client.append("a", "2").lsn());
      assertEquals(3, fake.unary.get());
      assertEquals(1, fake.streams.get());
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"does not know the method", "ends at the first refusal"})
  void olderServerGetsCalls(String server) throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.shared = stream -> {
        stream.receive();
        stream.receive();
        if (server.equals("does not know the method")) {
          stream.fail(Status.UNIMPLEMENTED.asRuntimeException());
          return;
        }
        Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
        facts.put("request_id", "0");
        stream.fail(Fake.refusal(Code.FAILED_PRECONDITION, Reason.FENCED, facts));
      };
      CompletableFuture<BatchAck> one = start(() -> client.appendBatch(Batch.of("a", NewRecord.of("x"))));
      CompletableFuture<BatchAck> other = start(() -> client.appendBatch(Batch.of("a", NewRecord.of("y"))));
      assertEquals(7, one.get(10, TimeUnit.SECONDS).appends().get(0).firstLsn());
      assertEquals(7, other.get(10, TimeUnit.SECONDS).appends().get(0).firstLsn());
      assertEquals(2, fake.unary.get());
    }
  }

  @Test
  void largeAppendIsACall() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      client.append("a", NewRecord.of(new byte[Appends.MAX_BYTES]));
      client.appendBatch(Batch.of("a", NewRecord.of(new byte[Appends.MAX_BYTES])));
      assertEquals(2, fake.unary.get());
      assertEquals(0, fake.streams.get());
      client.append("a", NewRecord.of(new byte[Appends.MAX_BYTES - 100]));
      assertEquals(1, fake.streams.get());
    }
  }

  @Test
  void interceptorsAndTheOptionMakeCalls() throws Exception {
    try (Fake fake = new Fake();
        WaldClient traced = fake.builder().intercept(new ClientInterceptor[] {NO_INTERCEPTOR}).build();
        WaldClient alone = fake.builder().shareAppends(false).build()) {
      for (WaldClient client : List.of(traced, alone)) {
        client.append("a", "x");
        client.appendBatch(Batch.of("a", NewRecord.of("x")));
      }
      assertEquals(4, fake.unary.get());
      assertEquals(0, fake.streams.get());
    }
  }

  private static final ClientInterceptor NO_INTERCEPTOR = new ClientInterceptor() {
    @Override
    public <Q, A> io.grpc.ClientCall<Q, A> interceptCall(io.grpc.MethodDescriptor<Q, A> method, io.grpc.CallOptions options,
        io.grpc.Channel next) {
      return next.newCall(method, options);
    }
  };

  @Test
  void idleStreamIsEndedAndTheNextAppendOpensAnother() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      client.append("a", "x");
      client.append("a", "x");
      assertEquals(1, fake.streams.get());
      assertEquals(0, fake.streamsEnded.get());
      until(() -> fake.streamsEnded.get() == 1);
      client.append("a", "x");
      assertEquals(2, fake.streams.get());
      assertEquals(0, fake.unary.get());
    }
  }

  @Test
  void streamWithAnAppendUnderwayIsNotIdle() throws Exception {
    CountDownLatch answer = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.append = request -> {
        if (textOf(request).equals("1")) {
          ClientTest.await(answer);
        }
        return echo(request);
      };
      client.append("a", "0");
      CompletableFuture<Ack> underway = start(() -> client.append("a", "1"));
      Thread.sleep(2 * TimeUnit.NANOSECONDS.toMillis(AppendStream.IDLE_NANOS));
      assertEquals(0, fake.streamsEnded.get());
      answer.countDown();
      assertEquals(1, underway.get(10, TimeUnit.SECONDS).lsn());
    }
  }

  @Test
  void closeEndsTheStream() throws Exception {
    try (Fake fake = new Fake()) {
      WaldClient client = fake.client();
      client.append("a", "x");
      long began = System.nanoTime();
      client.close();
      // The end of an idle stream comes later.
      assertTrue(System.nanoTime() - began < AppendStream.IDLE_NANOS);
      assertEquals(1, fake.streamsEnded.get());
    }
  }

  @Test
  void appendsFollowTheServerAndTheOldStreamStillAnswers() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    CountDownLatch answer = new CountDownLatch(1);
    try (Fake a = new Fake(); Fake b = new Fake(); WaldClient client = WaldClient.builder(a.address()).retry(Fake.NO_PAUSES).build()) {
      a.append = request -> {
        if (textOf(request).equals("1")) {
          arrived.countDown();
          ClientTest.await(answer);
          return echo(request);
        }
        throw Fake.movedTo(b.address());
      };
      b.append = AppendsTest::echo;
      CompletableFuture<Ack> first = start(() -> client.append("a", "1"));
      ClientTest.await(arrived);
      assertEquals(2, client.append("a", "2").lsn());
      assertEquals(b.address(), client.server());
      assertEquals(3, client.append("a", "3").lsn());
      assertEquals(List.of(1, 1), List.of(a.streams.get(), b.streams.get()));
      until(() -> a.streamsEnded.get() == 1);
      assertFalse(first.isDone());
      answer.countDown();
      assertEquals(1, first.get(10, TimeUnit.SECONDS).lsn());
    }
  }

  @Test
  void headerOfTheStreamNamesTheOwner() throws Exception {
    try (Fake a = new Fake(); Fake b = new Fake(); WaldClient client = WaldClient.builder(a.address()).build()) {
      a.speaksFor = b.address();
      client.append("a", "x");
      until(() -> client.server().equals(b.address()));
      client.append("a", "x");
      assertEquals(List.of(1, 1), List.of(a.streams.get(), b.streams.get()));
    }
  }

  /** A proxy announces the end of a connection, and breaks it later. */
  @Test
  void appendsLeaveAConnectionWhoseEndIsAnnounced() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    CountDownLatch answer = new CountDownLatch(1);
    try (Fake fake = new Fake(Duration.ofSeconds(1)); WaldClient client = fake.client()) {
      fake.append = request -> {
        if (textOf(request).equals("1")) {
          arrived.countDown();
          ClientTest.await(answer);
        }
        return echo(request);
      };
      CompletableFuture<Ack> first = start(() -> client.append("a", "1"));
      ClientTest.await(arrived);
      until(() -> {
        client.append("a", "2");
        return fake.streams.get() > 1;
      });
      assertFalse(first.isDone());
      answer.countDown();
      assertEquals(1, first.get(10, TimeUnit.SECONDS).lsn());
    }
  }
}
