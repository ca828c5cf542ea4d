package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.Code;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.nio.channels.ClosedChannelException;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import org.junit.jupiter.api.DynamicTest;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestFactory;

class FailureTest {
  private static final Map<String, String> SAFE = Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE);
  private static final Map<String, String> NEVER = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
  private static final Map<String, String> UNKNOWN = Fake.stated(Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION);

  /** The transport's own class is in a package that is not public. */
  private static final class Http2Exception extends Exception {
    private static final long serialVersionUID = 1L;
  }

  private static Failure read(StatusRuntimeException answer, boolean sent) {
    return Failure.of(answer.getStatus(), answer.getTrailers(), sent, false);
  }

  private static StatusRuntimeException plain(Status status, String description) {
    return status.withDescription(description).asRuntimeException(new Metadata());
  }

  @Test
  void reasonsAreThoseOfTheContract() {
    List<String> contract = Arrays.stream(dev.wald.v1.Reason.values())
        .filter(reason -> reason != dev.wald.v1.Reason.UNRECOGNIZED && reason != dev.wald.v1.Reason.REASON_UNSPECIFIED)
        .map(reason -> reason.name().substring("REASON_".length()))
        .sorted()
        .toList();
    List<String> named = Arrays.stream(Reason.values())
        .filter(reason -> reason != Reason.NONE && reason != Reason.OTHER)
        .map(Reason::name)
        .sorted()
        .toList();
    assertEquals(contract, named);
  }

  @Test
  void levelsHaveTheNumbersOfTheContract() {
    for (Durability level : Durability.values()) {
      assertEquals("DURABILITY_" + level.name(), level.proto().name());
      assertEquals(level, Durability.of(level.proto()));
    }
    for (Visibility level : Visibility.values()) {
      assertEquals("VISIBILITY_" + level.name(), level.proto().name());
    }
  }

  @Test
  void errorOfWaldHasReasonFactsChecksAndDelay() {
    Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
    facts.put("actual_lsn", "18446744073709551615");
    com.google.rpc.ErrorInfo info = com.google.rpc.ErrorInfo.newBuilder().setDomain("wald.dev").setReason("POSITION_MISMATCH")
        .putAllMetadata(facts).build();
    WaldException failure = read(Fake.status(Code.FAILED_PRECONDITION, info, Fake.delay(3), Fake.failed("FENCED", "a", "7, not 6")), true).exception();
    assertEquals(FailureKind.SERVER, failure.kind());
    assertEquals(Status.Code.FAILED_PRECONDITION, failure.code());
    assertEquals(Reason.POSITION_MISMATCH, failure.reason());
    assertEquals(OptionalLong.of(-1), failure.number("actual_lsn"));
    assertEquals(OptionalLong.empty(), failure.number("outcome"));
    assertEquals(Duration.ofSeconds(3), failure.retryAfter().orElseThrow());
    assertEquals(List.of(new FailedCheck(Reason.FENCED, "FENCED", "a", "7, not 6")), failure.failedChecks());
    assertEquals("POSITION_MISMATCH: no", failure.getMessage());
  }

  @Test
  void reasonOfANewerServerKeepsItsText() {
    WaldException failure = read(Fake.refusal(Code.ABORTED, "wald.dev", "MOON_PHASE", NEVER), true).exception();
    assertEquals(Reason.OTHER, failure.reason());
    assertEquals("MOON_PHASE", failure.reasonText());
    assertTrue(failure.getMessage().startsWith("MOON_PHASE: "));
  }

  /** The whole table: the outcome of a write for each error, and whether to send it again. */
  @TestFactory
  List<DynamicTest> outcomeAndRetryOfErrors() {
    return List.of(
        row("busy", Fake.refusal(Code.RESOURCE_EXHAUSTED, Reason.BUSY, SAFE), true, Outcome.NOT_APPLIED, Retry.SAFE),
        row("busy, to a read", Fake.refusal(Code.RESOURCE_EXHAUSTED, Reason.BUSY, Map.of()), true, Outcome.UNKNOWN, Retry.SAFE),
        row("starting", Fake.refusal(Code.UNAVAILABLE, Reason.STARTING, SAFE), true, Outcome.NOT_APPLIED, Retry.SAFE),
        row("starting, without facts", Fake.refusal(Code.UNAVAILABLE, Reason.STARTING, Map.of()), true, Outcome.NOT_APPLIED, Retry.SAFE),
        row("journal failed underway", Fake.refusal(Code.INTERNAL, Reason.JOURNAL_FAILED, UNKNOWN), true, Outcome.UNKNOWN,
            Retry.SAFE_WITH_CONDITION),
        row("fenced", Fake.refusal(Code.FAILED_PRECONDITION, Reason.FENCED, NEVER), true, Outcome.NOT_APPLIED, Retry.NEVER),
        row("of a newer server", Fake.refusal(Code.ABORTED, "wald.dev", "MOON_PHASE", Map.of("retry", "MAYBE")), true, Outcome.UNKNOWN,
            Retry.NEVER),
        row("of another domain", Fake.refusal(Code.UNAVAILABLE, "mesh.example", "STARTING", SAFE), true, Outcome.UNKNOWN,
            Retry.SAFE_WITH_CONDITION),
        row("lost connection", plain(Status.UNAVAILABLE, "Network closed for unknown reason"), true, Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION),
        row("no connection", plain(Status.UNAVAILABLE, "io exception"), false, Outcome.NOT_APPLIED, Retry.SAFE),
        row("reset stream", plain(Status.INTERNAL, "HTTP/2 error code: INTERNAL_ERROR\nReceived Rst Stream"), true, Outcome.UNKNOWN,
            Retry.SAFE_WITH_CONDITION),
        row("cut stream", plain(Status.INTERNAL, "Received unexpected EOS on DATA frame from server."), true, Outcome.UNKNOWN,
            Retry.SAFE_WITH_CONDITION),
        row("closed channel", Status.UNKNOWN.withDescription("channel closed").withCause(new Exception(new ClosedChannelException()))
            .asRuntimeException(), true, Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION),
        row("no HTTP/2", Status.INTERNAL.withDescription("http2 exception").withCause(new Http2Exception()).asRuntimeException(), false,
            Outcome.NOT_APPLIED, Retry.SAFE),
        row("damaged answer", Status.INTERNAL.withCause(new IllegalStateException("x")).asRuntimeException(), true, Outcome.UNKNOWN, Retry.NEVER),
        row("foreign", plain(Status.INTERNAL, "something in between"), true, Outcome.UNKNOWN, Retry.NEVER),
        row("foreign, not sent", plain(Status.INTERNAL, "cannot marshal"), false, Outcome.NOT_APPLIED, Retry.NEVER),
        row("full, by something in between", plain(Status.RESOURCE_EXHAUSTED, ""), true, Outcome.UNKNOWN, Retry.NEVER),
        row("not wald", plain(Status.UNIMPLEMENTED, "unknown service"), true, Outcome.NOT_APPLIED, Retry.NEVER),
        row("deadline", plain(Status.DEADLINE_EXCEEDED, ""), true, Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION),
        row("deadline before it was sent", plain(Status.DEADLINE_EXCEEDED, ""), false, Outcome.NOT_APPLIED, Retry.SAFE),
        row("deadline of the other side", plain(Status.CANCELLED, "Timeout expired"), true, Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION));
  }

  private static DynamicTest row(String name, StatusRuntimeException answer, boolean sent, Outcome outcome, Retry retry) {
    return DynamicTest.dynamicTest(name, () -> {
      Failure failure = read(answer, sent);
      assertEquals(outcome, failure.outcome);
      assertEquals(retry, failure.retry);
    });
  }

  @Test
  void delayOfAnotherDomainIsNotBelieved() {
    com.google.rpc.ErrorInfo info = com.google.rpc.ErrorInfo.newBuilder().setDomain("mesh.example").setReason("STARTING").build();
    WaldException failure = read(Fake.status(Code.UNAVAILABLE, info, Fake.delay(3_600)), true).exception();
    assertTrue(failure.retryAfter().isEmpty());
    assertEquals(Reason.NONE, failure.reason());
  }

  @Test
  void callThatItsCallerGaveUpIsUnknownOnceSent() {
    Status cancelled = Status.CANCELLED.withDescription("Thread interrupted");
    Failure underway = Failure.of(cancelled, null, true, true);
    assertEquals(FailureKind.CANCELLED, underway.kind);
    assertEquals(Outcome.UNKNOWN, underway.outcome);
    Failure before = Failure.of(cancelled, null, false, true);
    assertEquals(Outcome.NOT_APPLIED, before.outcome);
    assertEquals(Retry.SAFE, before.retry);
  }

  @Test
  void errorAfterAnUnknownAttemptClaimsNothing() {
    Failure refused = read(Fake.refusal(Code.FAILED_PRECONDITION, Reason.POSITION_MISMATCH, NEVER), true);
    Failure changed = refused.afterUnknown();
    assertEquals(Outcome.UNKNOWN, changed.outcome);
    assertEquals(Retry.NEVER, changed.retry);
    assertEquals(Reason.POSITION_MISMATCH, changed.reason);
    assertEquals(Outcome.NOT_APPLIED, refused.outcome);
    assertTrue(changed.text().endsWith("(it may have been applied)"));
    Failure busy = read(Fake.refusal(Code.RESOURCE_EXHAUSTED, Reason.BUSY, SAFE), true).afterUnknown();
    assertEquals(Retry.SAFE_WITH_CONDITION, busy.retry);
  }

  @Test
  void exceptionSurvivesSerialization() throws Exception {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try (ObjectOutputStream out = new ObjectOutputStream(bytes)) {
      out.writeObject(read(Fake.refusal(Code.FAILED_PRECONDITION, Reason.FENCED, NEVER), true).exception());
    }
    try (ObjectInputStream in = new ObjectInputStream(new ByteArrayInputStream(bytes.toByteArray()))) {
      WaldException copy = (WaldException) in.readObject();
      assertEquals(Reason.FENCED, copy.reason());
      assertEquals("NEVER", copy.facts().get("retry"));
    }
  }
}
