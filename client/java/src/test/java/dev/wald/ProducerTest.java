package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import dev.wald.v1.AppendCondition;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.CreateLogResponse;
import dev.wald.v1.ForgetProducerRequest;
import dev.wald.v1.ForgetProducerResponse;
import dev.wald.v1.GetLogResponse;
import dev.wald.v1.Log;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class ProducerTest {
  /** A log that knows the repeats of its producer. */
  private static final class Journal {
    private final List<String> applied = new ArrayList<>();

    /** Appends a batch unless it is a repeat, and answers. */
    private synchronized AppendSessionResponse apply(AppendSessionRequest request) {
      var part = request.getBatch().getBatches(0);
      long sequence = part.getCondition().getProducer().getSequence();
      if (sequence > applied.size()) {
        throw Fake.refusal(Code.ABORTED, Reason.PRODUCER_GAP, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER));
      }
      if (sequence == applied.size()) {
        applied.add(part.getRecords(0).getData().toStringUtf8());
      }
      return Fake.ackOf(request, sequence);
    }

    private void applyAll(Fake.Stream<AppendSessionRequest, AppendSessionResponse> stream) throws InterruptedException {
      try {
        for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
          stream.send(apply(request));
        }
        stream.end();
      } catch (StatusRuntimeException refused) {
        stream.fail(refused);
      }
    }
  }

  private static List<CompletableFuture<LogAck>> send(Producer producer, int count) {
    List<CompletableFuture<LogAck>> answers = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      answers.add(producer.send(String.valueOf(i)));
    }
    return answers;
  }

  @Test
  void producerKeepsToItsLogAndNumbersItsBatches() throws Exception {
    List<AppendCondition> seen = new CopyOnWriteArrayList<>();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
          seen.add(request.getBatch().getBatches(0).getCondition());
          stream.send(Fake.ackOf(request, seen.size() - 1));
        }
        stream.end();
      };
      try (Producer producer = client.producer("a", ProducerOptions.DEFAULT.id("p", 3).firstSequence(5).writerEpoch(4))) {
        send(producer, 2);
        assertEquals(9, producer.logId());
      }
      assertEquals(2, seen.size());
      for (int i = 0; i < 2; i++) {
        assertEquals(9, seen.get(i).getLogId());
        assertEquals(4, seen.get(i).getWriterEpoch());
        assertEquals("p", seen.get(i).getProducer().getId());
        assertEquals(3, seen.get(i).getProducer().getEpoch());
        assertEquals(5 + i, seen.get(i).getProducer().getSequence());
      }
    }
  }

  @Test
  void producerSendsEverythingUnackedAgainInOrder() throws Exception {
    Journal journal = new Journal();
    List<WaldException> interruptions = new CopyOnWriteArrayList<>();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        switch (fake.sessions.get()) {
          case 1 -> {
            // Applies three, acks one, and is gone.
            AppendSessionResponse first = journal.apply(stream.receive());
            journal.apply(stream.receive());
            journal.apply(stream.receive());
            stream.send(first);
            fake.drop();
          }
          case 2 -> stream.fail(Fake.refusal(Code.UNAVAILABLE, Reason.STARTING, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE)));
          case 3 -> stream.fail(
              Fake.refusal(Code.INTERNAL, Reason.JOURNAL_FAILED, Fake.stated(Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)));
          default -> journal.applyAll(stream);
        }
      };
      List<CompletableFuture<LogAck>> answers;
      try (Producer producer = client.producer("a", ProducerOptions.DEFAULT.onInterruption(interruptions::add))) {
        answers = send(producer, 10);
      }
      for (int i = 0; i < 10; i++) {
        assertEquals(i, answers.get(i).get().firstLsn());
      }
      assertEquals(List.of("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"), journal.applied);
      assertEquals(List.of(Reason.NONE, Reason.STARTING, Reason.JOURNAL_FAILED), interruptions.stream().map(WaldException::reason).toList());
    }
  }

  @Test
  void fatalFailureEndsTheProducer() throws Exception {
    Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
    facts.put("request_id", "1");
    Journal journal = new Journal();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        AppendSessionResponse first = journal.apply(stream.receive());
        stream.receive();
        stream.receive();
        stream.send(first);
        stream.fail(Fake.refusal(Code.FAILED_PRECONDITION, Reason.FENCED, facts));
      };
      Producer producer = client.producer("a");
      List<CompletableFuture<LogAck>> answers = send(producer, 3);
      assertEquals(0, answers.get(0).get(10, TimeUnit.SECONDS).firstLsn());
      WaldException second = SessionTest.failureOf(answers.get(1));
      assertEquals(Reason.FENCED, second.reason());
      assertEquals(FailureKind.SERVER, second.kind());
      WaldException third = SessionTest.failureOf(answers.get(2));
      assertEquals(Reason.FENCED, third.reason());
      assertEquals(FailureKind.EARLIER_FAILED, third.kind());
      assertEquals(Outcome.NOT_APPLIED, third.outcome());
      assertEquals(Reason.FENCED, assertThrows(WaldException.class, () -> producer.append("x")).reason());
      assertEquals(Reason.FENCED, assertThrows(WaldException.class, producer::close).reason());
    }
  }

  @Test
  void fatalFailureAfterALostConnectionClaimsNothing() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        stream.receive();
        if (fake.sessions.get() == 1) {
          fake.drop();
        } else {
          stream.fail(Fake.refusal(Code.FAILED_PRECONDITION, Reason.PRODUCER_FENCED, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER)));
        }
      };
      Producer producer = client.producer("a");
      WaldException failure = assertThrows(WaldException.class, () -> producer.append("x"));
      assertEquals(Reason.PRODUCER_FENCED, failure.reason());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
    }
  }

  @Test
  void deliveryTimeoutEndsTheProducer() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream ->
          stream.fail(Fake.refusal(Code.RESOURCE_EXHAUSTED, Reason.DISK_FULL, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE)));
      Producer producer = client.producer("a", ProducerOptions.DEFAULT.deliveryTimeout(Duration.ofMillis(200)));
      WaldException failure = assertThrows(WaldException.class, () -> producer.append("x"));
      assertEquals(FailureKind.TIMEOUT, failure.kind());
      assertEquals(Reason.DISK_FULL, ((WaldException) failure.getCause().getCause()).reason());
      assertEquals(FailureKind.EARLIER_FAILED, assertThrows(WaldException.class, () -> producer.send("x")).kind());
    }
  }

  @Test
  void producerThatIsAckedSteadilyDoesNotEnd() throws Exception {
    Journal journal = new Journal();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
          // The pace of a slow server: all of it takes longer than the timeout.
          Thread.sleep(50);
          stream.send(journal.apply(request));
        }
        stream.end();
      };
      List<CompletableFuture<LogAck>> answers;
      try (Producer producer = client.producer("a", ProducerOptions.DEFAULT.deliveryTimeout(Duration.ofSeconds(1)))) {
        answers = send(producer, 30);
      }
      assertEquals(29, answers.get(29).get().firstLsn());
    }
  }

  @Test
  void producerLeavesASilentStreamForAnother() throws Exception {
    Journal journal = new Journal();
    List<WaldException> interruptions = new CopyOnWriteArrayList<>();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        if (fake.sessions.get() > 1) {
          journal.applyAll(stream);
          return;
        }
        // Applies all, acks nothing.
        for (int i = 0; i < 3; i++) {
          journal.apply(stream.receive());
        }
      };
      ProducerOptions options = ProducerOptions.DEFAULT.deliveryTimeout(Duration.ofSeconds(2)).onInterruption(interruptions::add);
      List<CompletableFuture<LogAck>> answers;
      try (Producer producer = client.producer("a", options)) {
        answers = send(producer, 3);
      }
      for (int i = 0; i < 3; i++) {
        assertEquals(i, answers.get(i).get().firstLsn());
      }
      assertEquals(List.of("0", "1", "2"), journal.applied);
      assertEquals(1, interruptions.size());
      assertEquals(FailureKind.CONNECTION_LOST, interruptions.get(0).kind());
      assertTrue(interruptions.get(0).getMessage().contains("no ack within PT1S"), interruptions.toString());
    }
  }

  @Test
  void timerForgetsProducersThatAreClosed() throws Exception {
    Journal journal = new Journal();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = journal::applyAll;
      int before = Timer.waiting();
      for (int i = 0; i < 20; i++) {
        try (Producer producer = client.producer("a", ProducerOptions.DEFAULT.firstSequence(i).deliveryTimeout(Duration.ofDays(1)))) {
          producer.append(String.valueOf(i));
        }
      }
      // A close leaves a timer of 1 s for the end of its stream.
      AppendsTest.until(() -> Timer.waiting() <= before);
    }
  }

  @Test
  void errorInTheThreadOfTheProducerFailsEveryBatch() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        stream.receive();
        fake.drop();
      };
      AssertionError bug = new AssertionError("of the program");
      Producer producer = client.producer("a", ProducerOptions.DEFAULT.onInterruption(interruption -> {
        throw bug;
      }));
      CompletableFuture<LogAck> answer = producer.send("x");
      assertEquals(Outcome.UNKNOWN, SessionTest.failureOf(answer).outcome());
      assertEquals(bug, assertThrows(WaldException.class, producer::close).getCause());
      assertEquals(FailureKind.EARLIER_FAILED, assertThrows(WaldException.class, () -> producer.send("y")).kind());
    }
  }

  @Test
  void closeDoesNotWaitForAServerThatNeverEndsTheStream() throws Exception {
    Journal journal = new Journal();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
          stream.send(journal.apply(request));
        }
      };
      Producer producer = client.producer("a");
      send(producer, 3);
      producer.close();
      assertEquals(3, journal.applied.size());
    }
  }

  @Test
  void producerHoldsBackTooMuch() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    Journal journal = new Journal();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        goOn.await();
        journal.applyAll(stream);
      };
      Producer producer = client.producer("a", ProducerOptions.DEFAULT.inFlight(2, 1 << 20));
      send(producer, 2);
      CountDownLatch begun = new CountDownLatch(1);
      CompletableFuture<LogAck> third = CompletableFuture.supplyAsync(() -> {
        begun.countDown();
        return producer.append("2");
      });
      ClientTest.await(begun);
      assertFalse(third.isDone());
      goOn.countDown();
      assertEquals(2, third.get(10, TimeUnit.SECONDS).firstLsn());
      producer.close();
      assertEquals(FailureKind.CLOSED, assertThrows(WaldException.class, () -> producer.send("x")).kind());
      ProducerOptions tooMany = ProducerOptions.DEFAULT.inFlight(1_025, 1);
      assertEquals(FailureKind.USAGE, assertThrows(WaldException.class, () -> client.producer("a", tooMany)).kind());
    }
  }

  /** Opens a producer. {@code found} has the log at each question; 0: none. Returns the calls and the number of the producer's log. */
  private static String opened(Long... found) throws Exception {
    Queue<Long> left = new ConcurrentLinkedQueue<>(List.of(found));
    List<String> calls = new CopyOnWriteArrayList<>();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.getLog = request -> {
        calls.add("get");
        long id = left.remove();
        if (id == 0) {
          throw Fake.refusal(Code.NOT_FOUND, Reason.LOG_NOT_FOUND, Map.of());
        }
        return GetLogResponse.newBuilder().setLog(Log.newBuilder().setLogId(id)).build();
      };
      fake.create = request -> {
        calls.add("create");
        if (!left.isEmpty()) {
          throw Fake.refusal(Code.ALREADY_EXISTS, Reason.LOG_EXISTS, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER));
        }
        return CreateLogResponse.newBuilder().setLog(Log.newBuilder().setLogId(11)).build();
      };
      try (Producer producer = client.producer("a")) {
        return String.join(" ", calls) + " " + producer.logId();
      }
    }
  }

  @Test
  void producerCreatesALogOnlyIfThereIsNone() throws Exception {
    assertEquals("get 9", opened(9L));
    assertEquals("get create 11", opened(0L));
    // Another client creates it, and deletes it again.
    assertEquals("get create get 9", opened(0L, 9L));
    assertEquals("get create get create 11", opened(0L, 0L));
  }

  @Test
  void randomIdBeginsAtTheLowestEpochAndIsForgotten() throws Exception {
    AtomicReference<ForgetProducerRequest> forgotten = new AtomicReference<>();
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.getLog = request -> GetLogResponse.newBuilder().setLog(Log.newBuilder().setLogId(9).setFirstProducerEpoch(6)).build();
      fake.forget = request -> {
        forgotten.set(request);
        return ForgetProducerResponse.getDefaultInstance();
      };
      Producer producer = client.producer("a");
      assertEquals(6, producer.epoch());
      producer.append("x");
      producer.close();
      assertEquals(producer.id(), forgotten.get().getProducerId());
      assertEquals(9, forgotten.get().getLogId());
      forgotten.set(null);
      client.producer("a").close();
      assertTrue(forgotten.get() == null, "a producer that has sent nothing is not known");
    }
  }

  @Test
  void closeOfTheClientEndsTheProducer() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        stream.receive();
        arrived.countDown();
        stream.receive();
      };
      Producer producer = client.producer("a");
      CompletableFuture<LogAck> answer = producer.send("x");
      ClientTest.await(arrived);
      client.close();
      WaldException failure = SessionTest.failureOf(answer);
      assertEquals(FailureKind.CLOSED, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      assertThrows(WaldException.class, producer::close);
    }
  }

  @Test
  void closeWithABoundGivesUp() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        stream.receive();
        arrived.countDown();
        stream.receive();
      };
      Producer producer = client.producer("a");
      CompletableFuture<LogAck> answer = producer.send("x");
      ClientTest.await(arrived);
      assertEquals(FailureKind.TIMEOUT, assertThrows(WaldException.class, () -> producer.close(Duration.ZERO)).kind());
      assertEquals(Outcome.UNKNOWN, SessionTest.failureOf(answer).outcome());
    }
  }
}
