package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import dev.wald.v1.GetTailRequest;
import dev.wald.v1.ScanResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.StatusRuntimeException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Collectors;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class NodesTest {
  private Fake a;
  private Fake b;
  private Fake c;

  @BeforeEach
  void start() throws Exception {
    a = new Fake();
    b = new Fake();
    c = new Fake();
  }

  @AfterEach
  void stop() throws Exception {
    a.close();
    b.close();
    c.close();
  }

  private static void fail(Fake fake, StatusRuntimeException status) {
    fake.door = headers -> status;
  }

  private static StatusRuntimeException passing(Reason reason) {
    return Fake.refusal(Code.UNAVAILABLE, reason, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE));
  }

  private static WaldClient client(RetryPolicy policy, String... addresses) {
    return WaldClient.builder(String.join(",", addresses)).retry(policy).build();
  }

  private static List<Integer> calls(Fake... fakes) {
    return Arrays.stream(fakes).map(Fake::called).collect(Collectors.toList());
  }

  private static String deadAddress() throws Exception {
    try (ServerSocket socket = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      return "127.0.0.1:" + socket.getLocalPort();
    }
  }

  /** Makes calls until the client has gone to a server. */
  private static void goesTo(WaldClient client, String address) {
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(10);
    while (!client.server().equals(address)) {
      assertTrue(System.nanoTime() < end, "the client is still at " + client.server());
      client.tail("a");
    }
  }

  @Test
  void namedOwnerIsFollowedAtOnceAndRemembered() {
    fail(a, Fake.movedTo(b.address()));
    try (WaldClient client = client(Fake.NO_PAUSES, a.address())) {
      // Plain appends: nothing was applied, so that they are repeated.
      client.append("a", "x");
      client.append("a", "x");
      assertEquals(List.of(1, 2), calls(a, b));
      // Back again, although the client was there before.
      a.door = headers -> null;
      fail(b, Fake.movedTo(a.address()));
      client.append("a", "x");
      client.tail("a");
      assertEquals(List.of(2, 1), calls(a, b));
    }
  }

  @Test
  void ownerThatAnswersThroughAnotherNodeIsCalledItself() {
    a.speaksFor = b.address();
    try (WaldClient client = client(Fake.NO_PAUSES, a.address(), c.address())) {
      client.append("a", "x");
      goesTo(client, b.address());
      calls(a, b);
      client.append("a", "x");
      assertEquals(List.of(0, 1), calls(a, b));
    }
  }

  @Test
  void ownerOutOfReachKeepsTheClientAtItsServer() throws Exception {
    for (String owner : List.of(deadAddress(), "a/b", b.address().replace("127.0.0.1", "0.0.0.0"))) {
      a.speaksFor = owner;
      try (WaldClient client = WaldClient.builder(a.address()).retry(Fake.NO_PAUSES).token("k7Qp2mXa").build()) {
        for (int i = 0; i < 20; i++) {
          client.append("a", "x");
        }
        assertEquals(a.address(), client.server());
      }
    }
  }

  @Test
  void nodesThatNameEachOtherDoNotMakeACallSpin() {
    fail(a, Fake.movedTo(b.address()));
    fail(b, Fake.movedTo(a.address()));
    try (WaldClient client = client(Fake.NO_PAUSES, a.address())) {
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(Reason.MOVED, failure.reason());
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
      assertEquals(b.address(), failure.server().orElseThrow());
      assertTrue(failure.getMessage().contains(b.address()));
      assertEquals(List.of(1, 1), calls(a, b));
    }
    try (WaldClient client = client(new RetryPolicy(5, Duration.ofMillis(10), Duration.ofSeconds(1)), a.address())) {
      assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertEquals(List.of(3, 2), calls(a, b));
    }
  }

  @Test
  void listIsTriedInARing() throws Exception {
    fail(b, passing(Reason.STARTING));
    try (WaldClient client = client(Fake.QUICK, deadAddress(), b.address(), c.address())) {
      client.append("a", "x");
      client.append("a", "x");
      assertEquals(List.of(1, 2), calls(b, c));
      // From the last over the dead first one.
      b.door = headers -> null;
      fail(c, passing(Reason.DRAINING));
      client.append("a", "x");
      assertEquals(List.of(1, 1), calls(b, c));
      // A node that knows no owner.
      fail(b, Fake.movedTo(""));
      c.door = headers -> null;
      client.append("a", "x");
      assertEquals(List.of(1, 1), calls(b, c));
    }
  }

  @Test
  void failureOfTheOwnerItselfKeepsTheServer() {
    fail(a, Fake.refusal(Code.RESOURCE_EXHAUSTED, Reason.BUSY, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE)));
    try (WaldClient client = client(Fake.QUICK, a.address(), b.address())) {
      assertEquals(Reason.BUSY, assertThrows(WaldException.class, () -> client.append("a", "x")).reason());
      assertEquals(0, b.called());
    }
  }

  @Test
  void serverWithoutItsBucketIsLeftForTheNextOne() {
    fail(a, passing(Reason.BUCKET_DOWN));
    try (WaldClient client = client(Fake.QUICK, a.address(), b.address())) {
      client.append("a", "x");
      assertEquals(1, b.called());
    }
  }

  @Test
  void nodeThatNamesItselfIsTakenAsOneThatKnowsNoOwner() {
    fail(a, Fake.movedTo(a.address()));
    try (WaldClient client = client(Fake.QUICK, a.address(), b.address())) {
      client.append("a", "x");
      assertEquals(List.of(1, 1), calls(a, b));
    }
  }

  @Test
  void ownerOutsideOfTheListIsLeftForTheFirstOfIt() throws Exception {
    fail(a, Fake.movedTo(""));
    fail(b, Fake.movedTo(c.address()));
    try (WaldClient client = client(Fake.QUICK, a.address(), b.address())) {
      client.append("a", "x");
      assertEquals(List.of(1, 1, 1), calls(a, b, c));
      a.door = headers -> null;
      c.close();
      client.tail("a");
      assertEquals(List.of(1, 0), calls(a, b));
    }
  }

  @Test
  void lateFailureOfAnOldServerMovesNothing() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    CountDownLatch answer = new CountDownLatch(1);
    a.tail = request -> {
      arrived.countDown();
      ClientTest.await(answer);
      throw passing(Reason.DRAINING);
    };
    a.append = request -> {
      throw Fake.movedTo(b.address());
    };
    try (WaldClient client = client(Fake.QUICK, a.address(), c.address())) {
      CompletableFuture<TailInfo> late = CompletableFuture.supplyAsync(() -> client.tail("a"));
      ClientTest.await(arrived);
      client.append("a", "x");
      answer.countDown();
      late.get(10, TimeUnit.SECONDS);
      assertEquals(b.address(), client.server());
      assertEquals(0, c.called());
    }
  }

  @Test
  void stubsOfTheProgramUseTheCurrentServer() {
    fail(a, Fake.movedTo(b.address()));
    try (WaldClient client = client(Fake.QUICK, a.address())) {
      client.append("a", "x");
      assertEquals(5, WalServiceGrpc.newBlockingStub(client.channel()).getTail(GetTailRequest.getDefaultInstance()).getTailLsn());
      assertEquals(List.of(1, 2), calls(a, b));
    }
  }

  @Test
  void producerFollowsTheOwnerWithoutLossOrRepeat() throws Exception {
    AtomicLong applied = new AtomicLong();
    Fake.Script acks = stream -> {
      for (var request = stream.receive(); request != null; request = stream.receive()) {
        if (request.getRequestId() == 2 && a.sessions.get() == 1 && b.sessions.get() == 0) {
          stream.fail(Fake.movedTo(b.address()));
          return;
        }
        assertEquals(applied.get(), request.getRequestId());
        stream.send(Fake.ackOf(request, applied.getAndIncrement()));
      }
      stream.end();
    };
    a.session = acks;
    b.session = acks;
    try (WaldClient client = client(Fake.QUICK, a.address()); Producer producer = client.producer("a")) {
      for (int i = 0; i < 5; i++) {
        assertEquals(i, producer.append("x").firstLsn());
      }
      assertEquals(b.address(), client.server());
    }
  }

  @Test
  void followerResumesAtTheOwnerByItsCursor() {
    a.scan = (request, stream) -> {
      stream.send(Fake.messageOf(0, "one"));
      stream.fail(Fake.movedTo(b.address()));
    };
    b.scan = (request, stream) -> stream.send(ScanResponse.newBuilder(Fake.messageOf(1, "two")).build());
    try (WaldClient client = client(Fake.QUICK, a.address()); Scan follower = client.follow("a")) {
      follower.next(Duration.ofSeconds(10)).orElseThrow();
      assertEquals("two", follower.next(Duration.ofSeconds(10)).orElseThrow().cursor().toStringUtf8());
      assertEquals("one", b.scans.get(0).getCursor().toStringUtf8());
    }
  }

  @Test
  void tokenDoesNotFollowToAnotherMachineInPlaintext() {
    fail(a, Fake.movedTo("10.0.0.1:6925"));
    try (WaldClient client = WaldClient.builder(a.address()).retry(RetryPolicy.NONE).token("k7Qp2mXa").build()) {
      WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertTrue(failure.getMessage().contains("does not follow"), failure.getMessage());
      assertEquals(a.address(), client.server());
      fail(a, Fake.movedTo("dns:///b"));
      failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
      assertTrue(failure.getMessage().contains("it is not HOST:PORT"), failure.getMessage());
    }
  }
}
