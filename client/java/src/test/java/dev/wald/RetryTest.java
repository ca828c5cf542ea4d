package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;

class RetryTest {
  private static Failure failure(Retry retry) {
    return new Failure(FailureKind.SERVER, Status.Code.UNAVAILABLE, "", Outcome.NOT_APPLIED, retry);
  }

  @Test
  void errorsAllowARepeatByItsEffect() {
    Map<Retry, List<Boolean>> table = Map.of(
        Retry.SAFE, List.of(true, true, true),
        Retry.SAFE_WITH_CONDITION, List.of(true, true, false),
        Retry.NEVER, List.of(false, false, false));
    table.forEach((retry, allowed) -> {
      for (Repeat repeat : Repeat.values()) {
        assertEquals(allowed.get(repeat.ordinal()), repeat.allows(failure(retry)), retry + " " + repeat);
      }
    });
  }

  @Test
  void quotaIsReportedAtOnce() {
    Failure quota = failure(Retry.SAFE);
    quota.reason = Reason.QUOTA;
    assertFalse(Repeat.HARMLESS.allows(quota));
  }

  @Test
  void conditionsThatHoldOnceGuardAnAppend() {
    Condition none = Condition.NONE;
    Map<Condition, Boolean> table = Map.of(none, false, none.mustExist(), false, none.writerEpoch(1), false, none.logId(7), false,
        none.expectLsn(3), true, none.mustNotExist(), true, none.sequence(new Sequence("p", 0, 0)), true);
    table.forEach((condition, guards) -> {
      assertEquals(guards, condition.guards(), condition.toString());
      Batch batch = Batch.builder().append("plain").append("a", List.of(), condition).build();
      assertEquals(guards ? Repeat.GUARDED : Repeat.HARMFUL, batch.repeat(), condition.toString());
    });
  }

  @Test
  void cursorThatMovesOnGuardsABatch() {
    CursorCommit commit = CursorCommit.of("a", "c", 4);
    assertEquals(Repeat.GUARDED, Batch.builder().append("a").move(commit.expectLsn(3)).build().repeat());
    assertEquals(Repeat.HARMFUL, Batch.builder().append("a").move(commit.expectLsn(4)).build().repeat());
    assertEquals(Repeat.HARMFUL, Batch.builder().append("a").move(commit).build().repeat());
    assertEquals(Repeat.GUARDED, Batch.builder().move(commit.expectLsn(3)).build().repeat());
    assertEquals(Repeat.HARMFUL, Batch.builder().move(commit.expectLsn(4)).build().repeat());
    assertEquals(Repeat.HARMFUL, Batch.builder().move(commit).build().repeat());
    assertEquals(Repeat.HARMLESS, Batch.builder().check(Check.of("a").mustExist()).build().repeat());
  }

  @Test
  void deadlineDecidesUnlessAPolicySaysOtherwise() {
    RetryPolicy policy = RetryPolicy.DEFAULT;
    long pauses = 0;
    for (int failures = 1; failures < policy.maxAttempts(); failures++) {
      pauses += policy.pause(failures, failure(Retry.SAFE));
    }
    assertTrue(pauses >= WaldClient.DEFAULT_TIMEOUT.toNanos(), "the attempts end after " + Duration.ofNanos(pauses));
  }

  @Test
  void pausesDoubleUpToTheirBoundWithJitter() {
    RetryPolicy policy = new RetryPolicy(5, Duration.ofMillis(10), Duration.ofMillis(35));
    int[] full = {10, 20, 35, 35};
    for (int i = 0; i < full.length; i++) {
      long pause = policy.pause(i + 1, failure(Retry.SAFE));
      assertTrue(pause >= full[i] * 500_000L && pause <= full[i] * 1_000_000L, full[i] + ": " + pause);
    }
    Failure asked = failure(Retry.SAFE);
    asked.retryAfter = Duration.ofSeconds(3);
    assertEquals(Duration.ofSeconds(3).toNanos(), policy.pause(1, asked));
    assertTrue(policy.pause(Integer.MAX_VALUE, failure(Retry.SAFE)) <= 35_000_000L);
  }

  @Test
  void namedOwnerIsTriedWithoutAPauseButNotTwiceInARow() {
    Pauses pauses = new Pauses(RetryPolicy.DEFAULT);
    Attempt named = new Attempt();
    named.named = true;
    assertEquals(0, pauses.next(failure(Retry.SAFE), named));
    assertTrue(pauses.next(failure(Retry.SAFE), named) > 0);
    assertEquals(0, pauses.next(failure(Retry.SAFE), named));
    assertTrue(pauses.next(failure(Retry.SAFE), new Attempt()) > 0);
  }
}
