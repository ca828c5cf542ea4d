package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import dev.wald.v1.AppendSessionRequest;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class SessionTest {
  private static final Batch BATCH = Batch.of("a", NewRecord.of("x"));

  private static List<CompletableFuture<BatchAck>> send(Session session, int count) {
    List<CompletableFuture<BatchAck>> answers = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      answers.add(session.send(BATCH));
    }
    return answers;
  }

  static WaldException failureOf(CompletableFuture<?> answer) {
    return (WaldException) assertThrows(ExecutionException.class, () -> answer.get(10, TimeUnit.SECONDS)).getCause();
  }

  @Test
  void sessionAcksInOrder() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      Session session = client.session();
      List<CompletableFuture<BatchAck>> answers = send(session, 3);
      session.close();
      for (int i = 0; i < 3; i++) {
        assertTrue(answers.get(i).isDone());
        assertEquals(i, answers.get(i).get().appends().get(0).firstLsn());
      }
      assertEquals(FailureKind.CLOSED, assertThrows(WaldException.class, () -> session.send(BATCH)).kind());
    }
  }

  @Test
  void sessionEndsAtTheFirstFailure() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
      facts.put("request_id", "1");
      fake.session = stream -> {
        AppendSessionRequest first = stream.receive();
        stream.receive();
        stream.receive();
        stream.send(Fake.ackOf(first, 0));
        stream.fail(Fake.refusal(Code.FAILED_PRECONDITION, Reason.FENCED, facts));
      };
      Session session = client.session();
      List<CompletableFuture<BatchAck>> answers = send(session, 3);
      assertEquals(0, answers.get(0).get(10, TimeUnit.SECONDS).appends().get(0).firstLsn());
      assertEquals(Reason.FENCED, failureOf(answers.get(1)).reason());
      WaldException third = failureOf(answers.get(2));
      assertEquals(FailureKind.EARLIER_FAILED, third.kind());
      assertEquals(Outcome.NOT_APPLIED, third.outcome());
      assertEquals(FailureKind.EARLIER_FAILED, assertThrows(WaldException.class, () -> session.send(BATCH)).kind());
      assertEquals(Reason.FENCED, assertThrows(WaldException.class, session::close).reason());
    }
  }

  @Test
  void requestsAfterAnUnknownOneAreUnknown() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      Map<String, String> facts = Fake.stated(Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION);
      facts.put("request_id", "0");
      fake.session = stream -> {
        stream.receive();
        stream.receive();
        stream.fail(Fake.refusal(Code.INTERNAL, Reason.JOURNAL_FAILED, facts));
      };
      List<CompletableFuture<BatchAck>> answers = send(client.session(), 2);
      for (CompletableFuture<BatchAck> answer : answers) {
        assertEquals(Outcome.UNKNOWN, failureOf(answer).outcome());
      }
    }
  }

  @Test
  void sessionThatLosesItsConnectionKnowsNothing() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        stream.receive();
        fake.drop();
      };
      Session session = client.session();
      WaldException failure = failureOf(session.send(BATCH));
      assertEquals(FailureKind.CONNECTION_LOST, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
      assertThrows(WaldException.class, session::close);
    }
  }

  @Test
  void sendBlocksWhileTheWindowIsFull() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        goOn.await();
        Fake.ackAll(stream);
      };
      try (Session session = client.session(1)) {
        session.send(BATCH);
        CountDownLatch begun = new CountDownLatch(1);
        CompletableFuture<Void> second = CompletableFuture.runAsync(() -> {
          begun.countDown();
          session.send(BATCH);
        });
        ClientTest.await(begun);
        assertFalse(second.isDone());
        goOn.countDown();
        second.get(10, TimeUnit.SECONDS);
      }
    }
  }

  @Test
  void sessionIsOpenedAgainWhileNothingWasSent() throws Exception {
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.drop();
      try (Session session = client.session()) {
        assertEquals(0, session.send(BATCH).get(10, TimeUnit.SECONDS).appends().get(0).firstLsn());
      }
    }
  }

  @Test
  void cancelledSessionKnowsNothing() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.client()) {
      fake.session = stream -> {
        stream.receive();
        arrived.countDown();
        stream.receive();
      };
      Session session = client.session();
      CompletableFuture<BatchAck> answer = session.send(BATCH);
      ClientTest.await(arrived);
      session.cancel();
      WaldException failure = failureOf(answer);
      assertEquals(FailureKind.CANCELLED, failure.kind());
      assertEquals(Outcome.UNKNOWN, failure.outcome());
    }
  }
}
