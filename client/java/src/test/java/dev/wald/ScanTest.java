package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import com.google.rpc.Code;
import dev.wald.v1.GetTailResponse;
import dev.wald.v1.ScanRequest;
import dev.wald.v1.ScanResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

@Timeout(60)
class ScanTest {
  private static final Duration SOON = Duration.ofSeconds(10);

  /** A fake that answers its scans with these scripts in turn, and then refuses. */
  @SafeVarargs
  private static Fake scanning(Consumer<Fake.Stream<ScanRequest, ScanResponse>>... scripts) throws Exception {
    Fake fake = new Fake();
    fake.scan = (request, stream) -> {
      int index = fake.scans.size() - 1;
      if (index < scripts.length) {
        scripts[index].accept(stream);
      } else {
        stream.fail(Fake.refusal(Code.INVALID_ARGUMENT, Reason.INVALID_SCAN, Map.of()));
      }
    };
    return fake;
  }

  private static void refuse(Fake.Stream<ScanRequest, ScanResponse> stream, Code code, Reason reason) {
    stream.fail(Fake.refusal(code, reason, Map.of()));
  }

  /** Takes events into the list, to the end. */
  private static void collect(Scan scan, List<Long> lsns) {
    scan.forEach(event -> event.batches().forEach(batch -> batch.records().forEach(record -> lsns.add(record.lsn()))));
  }

  @Test
  void followerResumesByItsCursorAndDeliversNothingTwice() throws Exception {
    List<WaldException> interruptions = new ArrayList<>();
    List<Long> lsns = new ArrayList<>();
    try (Fake fake = scanning(
            stream -> {
              stream.send(Fake.messageOf(0, "one"));
              stream.send(ScanResponse.newBuilder().setCursor(ByteString.copyFromUtf8("heartbeat")).build());
              refuse(stream, Code.UNAVAILABLE, Reason.DRAINING);
            },
            stream -> refuse(stream, Code.UNAVAILABLE, Reason.STARTING),
            stream -> {
              stream.send(Fake.messageOf(1, "two"));
              // A good end, which a follower does not believe.
              stream.end();
            },
            stream -> {
              stream.send(Fake.messageOf(2, "three"));
              refuse(stream, Code.DATA_LOSS, Reason.QUARANTINED);
            });
        WaldClient client = fake.client();
        Scan follower = client.follow("a", ScanOptions.DEFAULT.fromLsn(0).onInterruption(interruptions::add))) {
      WaldException failure = assertThrows(WaldException.class, () -> collect(follower, lsns));
      assertEquals(Reason.QUARANTINED, failure.reason());
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
      assertEquals(List.of(0L, 1L, 2L), lsns);
      assertEquals("three", follower.cursor().orElseThrow().toStringUtf8());
      assertEquals(3, interruptions.size());
      assertEquals(List.of("", "heartbeat", "heartbeat", "two"),
          fake.scans.stream().map(request -> request.getCursor().toStringUtf8()).toList());
      assertTrue(follower.isEnded());
    }
  }

  @Test
  void followerThatGotOnlyHeartbeatsBeginsAgainAtItsStart() throws Exception {
    try (Fake fake = scanning(
            stream -> {
              stream.send(ScanResponse.newBuilder().setRecoveryEpoch(1).build());
              refuse(stream, Code.UNAVAILABLE, Reason.DRAINING);
            },
            stream -> stream.send(Fake.messageOf(4, "five")));
        WaldClient client = fake.client();
        Scan follower = client.follow("a", ScanOptions.DEFAULT.fromLsn(4))) {
      assertEquals(4, follower.next(SOON).orElseThrow().batches().get(0).records().get(0).lsn());
      assertEquals(List.of(4L, 4L), fake.scans.stream().map(ScanRequest::getLsn).toList());
    }
  }

  @Test
  void followerGivesUpASilentConnection() throws Exception {
    List<WaldException> interruptions = new ArrayList<>();
    List<Long> lsns = new ArrayList<>();
    try (Fake fake = scanning(
            stream -> stream.send(Fake.messageOf(0, "one")),
            stream -> {
              stream.send(Fake.messageOf(1, "two"));
              refuse(stream, Code.DATA_LOSS, Reason.QUARANTINED);
            });
        WaldClient client = fake.builder().silenceTimeout(Duration.ofMillis(100)).build();
        Scan follower = client.follow("a", ScanOptions.DEFAULT.onInterruption(interruptions::add))) {
      assertThrows(WaldException.class, () -> collect(follower, lsns));
      assertEquals(List.of(0L, 1L), lsns);
      assertTrue(interruptions.get(0).getMessage().contains("nothing came for"), interruptions.toString());
    }
  }

  @ParameterizedTest
  @CsvSource({"0,10", "3,7", "6,4", "99,4"})
  void tailIsPinnedBeforeItIsFollowed(long offset, long lsn) throws Exception {
    try (Fake fake = scanning(stream -> refuse(stream, Code.OUT_OF_RANGE, Reason.BEYOND_TAIL)); WaldClient client = fake.client()) {
      fake.tail = request -> GetTailResponse.newBuilder().setFirstLsn(4).setTailLsn(10).build();
      try (Scan follower = client.follow("a", ScanOptions.DEFAULT.last(offset))) {
        assertThrows(WaldException.class, follower::next);
      }
      assertEquals(lsn, fake.scans.get(0).getLsn());
    }
  }

  @Test
  void followerOfAnyNodeLeavesTheTailToTheNode() throws Exception {
    try (Fake fake = scanning(stream -> stream.send(Fake.messageOf(7, "x"))); WaldClient client = fake.client()) {
      AtomicInteger questions = new AtomicInteger();
      fake.tail = request -> {
        questions.incrementAndGet();
        return GetTailResponse.newBuilder().setFirstLsn(4).setTailLsn(10).build();
      };
      try (Scan follower = client.follow("a", ScanOptions.DEFAULT.last(3).anyNode())) {
        assertEquals(7, follower.next(SOON).orElseThrow().batches().get(0).records().get(0).lsn());
      }
      assertTrue(fake.scans.get(0).hasTailOffset());
      assertEquals(3, fake.scans.get(0).getTailOffset());
      // The owner's tail is above that of a copy, which would refuse it.
      assertEquals(0, questions.get());
    }
  }

  @Test
  void followerThatCannotKnowItsPlaceGivesUp() throws Exception {
    try (Fake fake = scanning(
            stream -> {
              // A message without a cursor: the scan is open, and its place has no name.
              stream.send(ScanResponse.getDefaultInstance());
              refuse(stream, Code.UNAVAILABLE, Reason.DRAINING);
            },
            stream -> stream.send(Fake.messageOf(7, "x")));
        WaldClient client = fake.client();
        Scan follower = client.follow(Logs.all(), ScanOptions.DEFAULT.fromNow())) {
      assertEquals(Reason.DRAINING, assertThrows(WaldException.class, follower::next).reason());
      assertEquals(1, fake.scans.size());
    }
  }

  @Test
  void followerFromNowGivesUpAStreamThatEndedWithoutACursor() throws Exception {
    try (Fake fake = scanning(
            stream -> {
              stream.send(ScanResponse.getDefaultInstance());
              stream.end();
            },
            stream -> stream.send(Fake.messageOf(7, "x")));
        WaldClient client = fake.client();
        Scan follower = client.follow(Logs.all(), ScanOptions.DEFAULT.fromNow())) {
      assertThrows(WaldException.class, follower::next);
      assertEquals(1, fake.scans.size());
    }
  }

  @Test
  void followerThatWasRefusedBeginsAgainAtTheTail() throws Exception {
    try (Fake fake = scanning(stream -> refuse(stream, Code.UNAVAILABLE, Reason.STARTING), stream -> stream.send(Fake.messageOf(7, "x")));
        WaldClient client = fake.client();
        Scan follower = client.follow(Logs.all(), ScanOptions.DEFAULT.fromNow())) {
      assertEquals(7, follower.next(SOON).orElseThrow().batches().get(0).records().get(0).lsn());
      assertTrue(fake.scans.get(1).hasTailOffset());
    }
  }

  @Test
  void boundedScanAsksForTheRest() throws Exception {
    List<Long> lsns = new ArrayList<>();
    try (Fake fake = scanning(
            stream -> {
              stream.send(Fake.messageOf(0, "one"));
              refuse(stream, Code.UNAVAILABLE, Reason.DRAINING);
            },
            stream -> stream.send(Fake.messageOf(1, "two")));
        WaldClient client = fake.client();
        Scan scan = client.scan("a", ScanOptions.DEFAULT.maxRecords(2))) {
      collect(scan, lsns);
      assertEquals(List.of(0L, 1L), lsns);
      assertEquals(1, fake.scans.get(1).getMaxRecords());
    }
  }

  @Test
  void waitForAnEventHasABoundAndGoesOn() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    try (Fake fake = scanning(stream -> {
          ClientTest.await(goOn);
          stream.send(Fake.messageOf(0, "one"));
          stream.end();
        });
        WaldClient client = fake.client();
        Scan scan = client.scan("a")) {
      assertEquals(Optional.empty(), scan.next(Duration.ofMillis(20)));
      assertFalse(scan.isEnded());
      goOn.countDown();
      assertTrue(scan.next(SOON).isPresent());
      assertEquals(Optional.empty(), scan.next(SOON));
      assertTrue(scan.isEnded());
    }
  }

  @Test
  void questionForTheTailOutlastsAnImpatientCaller() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    AtomicInteger questions = new AtomicInteger();
    try (Fake fake = scanning(stream -> stream.send(Fake.messageOf(5, "new")));
        WaldClient client = fake.client();
        Scan follower = client.follow("a", ScanOptions.DEFAULT.fromNow())) {
      fake.tail = request -> {
        questions.incrementAndGet();
        ClientTest.await(goOn);
        return GetTailResponse.newBuilder().setFirstLsn(0).setTailLsn(5).build();
      };
      long began = System.nanoTime();
      for (int i = 0; i < 3; i++) {
        assertTrue(follower.next(Duration.ofMillis(50)).isEmpty());
        assertFalse(follower.isEnded());
      }
      assertTrue(System.nanoTime() - began < Duration.ofSeconds(5).toNanos(), "a call blocked");
      goOn.countDown();
      assertEquals(5, follower.next(SOON).orElseThrow().batches().get(0).records().get(0).lsn());
      assertEquals(1, questions.get());
    }
  }

  @Test
  void closeEndsTheQuestionForTheTail() throws Exception {
    CountDownLatch asked = new CountDownLatch(1);
    CountDownLatch goOn = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.tail = request -> {
        asked.countDown();
        ClientTest.await(goOn);
        return GetTailResponse.getDefaultInstance();
      };
      Scan follower = client.follow("a", ScanOptions.DEFAULT.fromNow());
      CompletableFuture<Optional<ScanEvent>> next = CompletableFuture.supplyAsync(follower::next);
      ClientTest.await(asked);
      follower.close();
      assertTrue(next.get(5, TimeUnit.SECONDS).isEmpty());
      goOn.countDown();
    }
  }

  @Test
  void closeEndsAWaitForTheNextEvent() throws Exception {
    CountDownLatch asked = new CountDownLatch(2);
    try (Fake fake = scanning(stream -> asked.countDown(), stream -> asked.countDown()); WaldClient client = fake.client()) {
      Scan first = client.follow("a");
      Scan second = client.follow("a");
      CompletableFuture<Optional<ScanEvent>> closed = CompletableFuture.supplyAsync(first::next);
      CompletableFuture<Optional<ScanEvent>> ended = CompletableFuture.supplyAsync(second::next);
      ClientTest.await(asked);
      first.close();
      assertEquals(Optional.empty(), closed.get(10, TimeUnit.SECONDS));
      client.close();
      Throwable failure = assertThrows(Exception.class, () -> ended.get(10, TimeUnit.SECONDS)).getCause();
      assertEquals(FailureKind.CLOSED, ((WaldException) failure).kind());
    }
  }
}
