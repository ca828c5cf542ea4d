package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import com.google.rpc.Code;
import dev.wald.v1.AppendResponse;
import dev.wald.v1.ScanResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

class TokenTest {
  @TempDir Path directory;

  /** A server that takes one token, and refuses others for a reason. */
  private static Fake guarded(AtomicReference<String> token, Reason reason) throws Exception {
    Fake fake = new Fake();
    Retry retry = reason == Reason.CREDENTIAL_EXPIRED ? Retry.SAFE : Retry.NEVER;
    fake.door = headers -> ("Bearer " + token.get()).equals(headers.get(Fake.AUTHORIZATION)) ? null
        : Fake.refusal(Code.UNAUTHENTICATED, reason, Fake.stated(Outcome.NOT_APPLIED, retry));
    return fake;
  }

  private Path write(String text) throws Exception {
    return Files.writeString(directory.resolve("token"), text);
  }

  @Test
  void everyCallCarriesTheToken() throws Exception {
    try (Fake fake = guarded(new AtomicReference<>("first"), Reason.BAD_CREDENTIAL)) {
      try (WaldClient client = fake.builder().token(" first\n").build()) {
        client.append("a", "x");
      }
      try (WaldClient client = fake.client()) {
        assertEquals(Reason.BAD_CREDENTIAL, assertThrows(WaldException.class, () -> client.append("a", "x")).reason());
      }
      assertEquals(List.of("Bearer first", ""), fake.tokens);
    }
  }

  @ParameterizedTest
  @EnumSource(names = {"BAD_CREDENTIAL", "CREDENTIAL_EXPIRED"})
  void refusedTokenIsReadAgainAndTheCallRepeated(Reason reason) throws Exception {
    AtomicReference<String> token = new AtomicReference<>("first");
    try (Fake fake = guarded(token, reason); WaldClient client = fake.builder().tokenFile(write("first")).build()) {
      client.append("a", "x");
      token.set("second");
      write("second\n");
      // A plain append: nothing was applied, so that it is repeated.
      client.append("a", "x");
      assertEquals(3, fake.called());
    }
  }

  @ParameterizedTest
  @EnumSource(names = {"BAD_CREDENTIAL", "CREDENTIAL_EXPIRED"})
  void refusedTokenThatTheFileStillHasIsNotSentAgain(Reason reason) throws Exception {
    try (Fake fake = guarded(new AtomicReference<>("second"), reason)) {
      for (WaldClient.Builder builder : List.of(fake.builder().tokenFile(write("first")), fake.builder().token("first"))) {
        try (WaldClient client = builder.build()) {
          WaldException failure = assertThrows(WaldException.class, () -> client.append("a", "x"));
          assertEquals(reason, failure.reason());
          assertEquals(1, fake.called());
          assertFalse(failure.getMessage().contains("first"));
        }
      }
    }
  }

  @Test
  void appendsTakeANewTokenBeforeTheOldOneIsRefused() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    CountDownLatch answer = new CountDownLatch(1);
    try (Fake fake = new Fake(); WaldClient client = fake.builder().tokenFile(write("first")).retry(RetryPolicy.NONE).build()) {
      fake.append = request -> {
        if (request.getLog().equals("slow")) {
          arrived.countDown();
          ClientTest.await(answer);
        }
        return AppendResponse.newBuilder().setLsn(7).build();
      };
      // Keeps the stream of the first token open.
      CompletableFuture<Ack> slow = CompletableFuture.supplyAsync(() -> client.append("slow", "x"));
      ClientTest.await(arrived);
      write("second");
      long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(10);
      while (!fake.tokens.contains("Bearer second")) {
        assertTrue(System.nanoTime() < end, "all appends have the old token");
        client.append("a", "x");
      }
      assertEquals(List.of("Bearer first", "Bearer second"), fake.tokens);
      answer.countDown();
      assertEquals(7, slow.get(10, TimeUnit.SECONDS).lsn());
    }
  }

  @Test
  void producerGoesOnAcrossAnExpiredToken() throws Exception {
    AtomicReference<String> token = new AtomicReference<>("first");
    BlockingQueue<WaldException> interruptions = new LinkedBlockingQueue<>();
    try (Fake fake = guarded(token, Reason.CREDENTIAL_EXPIRED)) {
      AtomicLong applied = new AtomicLong();
      fake.session = stream -> {
        for (var request = stream.receive(); request != null; request = stream.receive()) {
          if (applied.get() == 1 && token.get().equals("first")) {
            token.set("second");
            stream.fail(Fake.refusal(Code.UNAUTHENTICATED, Reason.CREDENTIAL_EXPIRED, Fake.stated(Outcome.NOT_APPLIED, Retry.SAFE)));
            return;
          }
          stream.send(Fake.ackOf(request, applied.getAndIncrement()));
        }
        stream.end();
      };
      try (WaldClient client = fake.builder().tokenFile(write("first")).build();
          Producer producer = client.producer("a", ProducerOptions.DEFAULT.id("p", 0).onInterruption(interruptions::add))) {
        producer.append("0");
        CompletableFuture<LogAck> answer = producer.send("1");
        // The file comes later than the end of the token.
        assertEquals(Reason.CREDENTIAL_EXPIRED, interruptions.poll(10, TimeUnit.SECONDS).reason());
        write("second");
        assertEquals(1, answer.get(10, TimeUnit.SECONDS).firstLsn());
      }
    }
  }

  @Test
  void followerGoesOnAcrossAnExpiredToken() throws Exception {
    AtomicReference<String> token = new AtomicReference<>("first");
    try (Fake fake = guarded(token, Reason.CREDENTIAL_EXPIRED)) {
      CountDownLatch expired = new CountDownLatch(1);
      fake.scan = (request, stream) -> {
        if (!request.getCursor().isEmpty()) {
          stream.send(ScanResponse.newBuilder().setCursor(ByteString.copyFromUtf8("12"))
              .addGaps(dev.wald.v1.Gap.newBuilder().setLog("a").setFromLsn(1)).build());
          return;
        }
        stream.send(ScanResponse.newBuilder().setCaughtUp(true).setCursor(ByteString.copyFromUtf8("1")).build());
        try {
          expired.await();
        } catch (InterruptedException interrupted) {
          return;
        }
        stream.fail(Fake.refusal(Code.UNAUTHENTICATED, Reason.CREDENTIAL_EXPIRED, java.util.Map.of()));
      };
      try (WaldClient client = fake.builder().tokenFile(write("first")).build(); Scan follower = client.follow("a")) {
        follower.next(Duration.ofSeconds(10)).orElseThrow();
        token.set("second");
        write("second");
        expired.countDown();
        assertEquals("12", follower.next(Duration.ofSeconds(10)).orElseThrow().cursor().toStringUtf8());
      }
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"127.0.0.1", "localhost", "[::1]", "http://127.1.2.3:80", "https://wald.internal"})
  void tokenGoesToLoopbackOrOverTls(String endpoint) {
    WaldClient.builder(endpoint).token("secret").build().close();
  }

  @ParameterizedTest
  @ValueSource(strings = {"wald.internal", "http://10.0.0.1", "dns:///wald", "0.0.0.0", "127.0.0.1.nip.io"})
  void tokenDoesNotCrossPlaintextToAnotherMachine(String endpoint) {
    WaldException failure = assertThrows(WaldException.class, () -> WaldClient.builder(endpoint).token("secret").build());
    assertEquals(FailureKind.TOKEN, failure.kind());
    assertFalse(failure.getMessage().contains("secret"));
    WaldClient.builder(endpoint).token("secret").allowInsecureToken().build().close();
  }

  @ParameterizedTest
  @ValueSource(strings = {"", " \n", "sec\nret", "sécret", "se cret"})
  void tokenThatCannotBeUsedIsNamed(String text) throws Exception {
    Path path = write(text);
    WaldException failure = assertThrows(WaldException.class, () -> WaldClient.builder("localhost").tokenFile(path).build());
    assertEquals(FailureKind.TOKEN, failure.kind());
    assertTrue(failure.getMessage().contains(path.toString()));
    assertFalse(failure.getMessage().contains("cret"));
  }

  @Test
  void fileThatChangesIsReadAtMostOnceASecond() throws Exception {
    AtomicLong now = new AtomicLong();
    TokenSource source = TokenSource.file(write("first"), now::get);
    write("second");
    assertEquals("first", source.current());
    now.addAndGet(TimeUnit.SECONDS.toNanos(1));
    assertEquals("second", source.current());
    write("");
    now.addAndGet(TimeUnit.SECONDS.toNanos(1));
    assertEquals("second", source.current(), "an empty file took the token away");
    assertFalse(source.toString().contains("second"));
  }
}
