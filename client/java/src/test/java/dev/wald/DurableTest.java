package dev.wald;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.Code;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.FollowerState;
import dev.wald.v1.ForgetProducerResponse;
import dev.wald.v1.GetLogResponse;
import dev.wald.v1.LogBatch;
import dev.wald.v1.ProducerState;
import dev.wald.v1.ScanResponse;
import dev.wald.v1.StateKind;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

@Timeout(60)
class DurableTest {
  private static final int ALWAYS = Integer.MAX_VALUE;
  private static final String IN_USE = "another process or producer uses it";

  private final List<AutoCloseable> opened = new ArrayList<>();
  private final List<Throwable> wrong = new CopyOnWriteArrayList<>();
  @TempDir private Path directory;

  @AfterEach
  void closeAll() throws Exception {
    for (int i = opened.size() - 1; i >= 0; i--) {
      opened.get(i).close();
    }
    assertEquals(List.of(), wrong);
  }

  /** A state in memory, which the next start of the program finds. */
  private static final class MemoryState implements State {
    private byte[] saved;
    private int saves;
    /** Null: saves succeed. */
    private Exception fails;
    /** Runs within each save. */
    private Executable saving = () -> {};

    MemoryState() {}

    MemoryState(byte[] saved) {
      this.saved = saved;
    }

    @Override
    public synchronized Optional<byte[]> load() {
      return Optional.ofNullable(saved);
    }

    @Override
    public synchronized void save(byte[] state) throws Exception {
      if (fails != null) {
        throw fails;
      }
      try {
        saving.execute();
      } catch (Throwable failure) {
        throw new AssertionError(failure);
      }
      saved = state.clone();
      saves++;
    }

    private synchronized void failWith(Exception failure) {
      fails = failure;
    }

    private synchronized int saves() {
      return saves;
    }

    private synchronized ProducerState producer() throws InvalidProtocolBufferException {
      return ProducerState.parseFrom(saved);
    }
  }

  /** A log that knows the repeats of its producer, and can forget the producer. */
  private static final class Journal {
    private final List<String> applied = new ArrayList<>();
    private final List<Long> sent = new ArrayList<>();
    /** The lowest epoch that the log takes, and the number of batches of earlier ones. */
    private long epoch;
    private int earlier;

    private synchronized void forget() {
      epoch++;
      earlier = applied.size();
    }

    private synchronized List<String> applied() {
      return List.copyOf(applied);
    }

    private synchronized int sent() {
      return sent.size();
    }

    /** Appends a batch unless it is a repeat, and answers. */
    private synchronized AppendSessionResponse apply(AppendSessionRequest request) {
      LogBatch part = request.getBatch().getBatches(0);
      long sequence = part.getCondition().getProducer().getSequence();
      sent.add(sequence);
      if (part.getCondition().getProducer().getEpoch() < epoch) {
        Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
        facts.put("first_epoch", String.valueOf(epoch));
        facts.put("request_id", String.valueOf(request.getRequestId()));
        throw Fake.refusal(Code.FAILED_PRECONDITION, Reason.PRODUCER_EXPIRED, facts);
      }
      int known = applied.size() - earlier;
      if (sequence > known) {
        throw Fake.refusal(Code.ABORTED, Reason.PRODUCER_GAP, Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER));
      }
      if (sequence == known) {
        applied.add(part.getRecords(0).getData().toStringUtf8());
      }
      return Fake.ackOf(request, earlier + sequence);
    }
  }

  /** One stream of a producer at the fake. */
  private final class Stream {
    private final Fake.Stream<AppendSessionRequest, AppendSessionResponse> stream;
    private final Journal journal;
    /** If there is one, each batch must be in this state before it comes. */
    private final MemoryState state;

    private Stream(Fake.Stream<AppendSessionRequest, AppendSessionResponse> stream, Journal journal, MemoryState state) {
      this.stream = stream;
      this.journal = journal;
      this.state = state;
    }

    private AppendSessionRequest receive() throws Exception {
      AppendSessionRequest request = stream.receive();
      if (request != null && state != null) {
        var producer = request.getBatch().getBatches(0).getCondition().getProducer();
        ProducerState saved = state.producer();
        long next = saved.getSequence() + saved.getBatchesCount();
        boolean early = saved.getEpoch() < producer.getEpoch() || saved.getEpoch() == producer.getEpoch() && next <= producer.getSequence();
        if (early || !saved.getId().equals(producer.getId()) || saved.getBatchesCount() > DurableProducer.BATCHES_KEPT) {
          wrong.add(new AssertionError("batch " + producer.getSequence() + " came before it was saved: " + saved));
        }
      }
      return request;
    }

    /** Applies and acks at most this number of requests. */
    private void applyAll(int count) throws Exception {
      for (int i = 0; i < count; i++) {
        AppendSessionRequest request = receive();
        if (request == null) {
          stream.end();
          return;
        }
        stream.send(journal.apply(request));
      }
    }

    /** Waits until the client has left. */
    private void awaitEnd() throws Exception {
      while (receive() != null) {
        continue;
      }
    }
  }

  private interface Script {
    void run(Stream stream, int count) throws Exception;
  }

  private static void acking(Stream stream, int count) throws Exception {
    stream.applyAll(ALWAYS);
  }

  private Fake fake() throws IOException {
    Fake fake = new Fake();
    opened.add(fake);
    return fake;
  }

  private WaldClient client(Fake fake) {
    WaldClient client = fake.client();
    opened.add(client);
    return client;
  }

  /** A fake with one log, number 9, whose sessions go as the script says. */
  private Fake producing(Journal journal, MemoryState state, Script script) throws IOException {
    Fake fake = fake();
    AtomicInteger streams = new AtomicInteger();
    fake.session = stream -> {
      int count = streams.incrementAndGet();
      try {
        script.run(new Stream(stream, journal, state), count);
      } catch (StatusRuntimeException refused) {
        stream.fail(refused);
      } catch (Exception failure) {
        wrong.add(failure);
        throw failure;
      }
    };
    return fake;
  }

  private Fake producing(Journal journal, Script script) throws IOException {
    return producing(journal, null, script);
  }

  private DurableProducer open(WaldClient client, State state, ProducerOptions options) {
    DurableProducer producer = client.durableProducer("a", state, options);
    opened.add(producer::abort);
    return producer;
  }

  private DurableProducer open(WaldClient client, State state) {
    return open(client, state, ProducerOptions.DEFAULT);
  }

  /** Appends one batch per number. */
  private static void appendAll(DurableProducer producer, long from, long to) {
    for (long number = from; number < to; number++) {
      assertEquals(number, producer.appendBatch(String.valueOf(number)));
    }
  }

  private static List<String> numbersTo(int count) {
    return IntStream.range(0, count).mapToObj(String::valueOf).toList();
  }

  private static WaldException failureOf(Executable call) {
    return assertThrows(WaldException.class, call);
  }

  private static WaldException refused(Executable call, String text) {
    WaldException failure = failureOf(call);
    assertEquals(FailureKind.STATE, failure.kind());
    assertTrue(failure.getMessage().contains(text), failure.getMessage());
    return failure;
  }

  /** The state of a producer with these batches without an ack. */
  private static ProducerState savedProducer(StateKind kind, String... texts) {
    ProducerState.Builder state = ProducerState.newBuilder().setLog("a").setLogId(9).setId("p").setKind(kind);
    for (String text : texts) {
      state.addBatches(LogBatch.newBuilder().addRecords(NewRecord.of(text).proto()));
    }
    return state.build();
  }

  private static MemoryState stateWith(String... texts) {
    return new MemoryState(savedProducer(StateKind.STATE_KIND_PRODUCER, texts).toByteArray());
  }

  @Test
  void batchesWithoutAnAckAreSentAgainByTheNextStart() throws Exception {
    int lives = 10;
    BlockingQueue<Integer> arrived = new LinkedBlockingQueue<>();
    Journal journal = new Journal();
    Fake fake = producing(journal, (stream, count) -> {
      if (count > lives) {
        stream.applyAll(ALWAYS);
        return;
      }
      // The program ends before it sees the acks of the last two batches.
      stream.applyAll(2);
      journal.apply(stream.receive());
      journal.apply(stream.receive());
      arrived.add(count);
      stream.awaitEnd();
    });
    WaldClient client = client(fake);
    MemoryState state = new MemoryState();
    String id = "";
    for (int life = 0; life < lives; life++) {
      DurableProducer producer = open(client, state);
      assertEquals(5 * life, producer.nextSequence());
      assertTrue(life == 0 || producer.id().equals(id));
      id = producer.id();
      appendAll(producer, 5 * life, 5 * life + 5);
      assertEquals(life + 1, arrived.poll(30, TimeUnit.SECONDS));
      producer.abort();
    }
    assertTrue(state.producer().getBatchesCount() > 0, "every batch was acked");
    open(client, state).close();
    assertEquals(numbersTo(5 * lives), journal.applied());
    assertTrue(journal.sent() > 5 * lives);
    ProducerState left = state.producer();
    assertEquals(5 * lives, left.getSequence());
    assertEquals(0, left.getBatchesCount());
    assertEquals(id, left.getId());
  }

  @Test
  void stateIsSavedBeforeTheFirstBatchAndBeforeEachBatch() throws Exception {
    MemoryState state = new MemoryState();
    Journal journal = new Journal();
    Fake fake = producing(journal, state, DurableTest::acking);
    fake.getLog = request ->
        GetLogResponse.newBuilder().setLog(dev.wald.v1.Log.newBuilder().setName("a").setLogId(9).setFirstProducerEpoch(7)).build();
    fake.forget = request -> {
      wrong.add(new AssertionError("the server forgets the id"));
      return ForgetProducerResponse.getDefaultInstance();
    };
    DurableProducer producer = open(client(fake), state);
    ProducerState.Builder expected = ProducerState.newBuilder().setLog("a").setLogId(9).setId(producer.id()).setEpoch(7)
        .setKind(StateKind.STATE_KIND_PRODUCER);
    assertEquals(expected.build(), state.producer());
    assertFalse(producer.id().isEmpty());
    assertEquals(9, producer.logId());
    appendAll(producer, 0, 200);
    producer.flush();
    assertEquals(expected.setSequence(200).build(), state.producer());
    producer.close();
    int saves = state.saves();
    assertEquals(FailureKind.CLOSED, failureOf(() -> producer.appendBatch("x")).kind());
    assertEquals(FailureKind.CLOSED, failureOf(producer::flush).kind());
    producer.close();
    assertEquals(saves, state.saves());
    assertEquals(numbersTo(200), journal.applied());
  }

  @Test
  void stateHasTheBytesOfProducerState() throws Exception {
    MemoryState state = new MemoryState();
    Fake fake = producing(new Journal(), (stream, count) -> stream.awaitEnd());
    DurableProducer producer = open(client(fake), state, ProducerOptions.DEFAULT.id("p", 3).firstSequence(5));
    byte[] data = "first".getBytes();
    NewRecord record = NewRecord.of(data).header("k", "v").time(Instant.EPOCH.plusNanos(7_000)).checksum(99);
    assertEquals(5, producer.appendBatch(record, NewRecord.of("second")));
    // The caller may use the array again.
    Arrays.fill(data, (byte) 'X');
    assertEquals(6, producer.appendBatch("third"));
    // As any encoder of the contract writes it.
    byte[] expected = bytes(
        0x0a, 1, 'a', 0x10, 9, 0x1a, 1, 'p', 0x20, 3, 0x28, 5,
        0x32, 41,
        0x12, 29, 0x0a, 5, 'f', 'i', 'r', 's', 't', 0x12, 6, 0x0a, 1, 'k', 0x12, 1, 'v', 0x19, 7, 0, 0, 0, 0, 0, 0, 0, 0x25, 99, 0, 0, 0,
        0x12, 8, 0x0a, 6, 's', 'e', 'c', 'o', 'n', 'd',
        0x32, 9, 0x12, 7, 0x0a, 5, 't', 'h', 'i', 'r', 'd',
        0x78, 1);
    assertEquals(ProducerState.parseFrom(expected), state.producer());
    assertArrayEquals(expected, state.load().orElseThrow());
  }

  private static byte[] bytes(int... values) {
    byte[] list = new byte[values.length];
    for (int i = 0; i < list.length; i++) {
      list[i] = (byte) values[i];
    }
    return list;
  }

  @Test
  void stateOfAnotherLogIsRefused() throws Exception {
    WaldClient client = client(producing(new Journal(), DurableTest::acking));
    MemoryState state = new MemoryState();
    open(client, state);
    refused(() -> client.durableProducer("other", state), "\"a\"");
    for (String nonsense : List.of("", "nonsense")) {
      refused(() -> client.durableProducer("a", new MemoryState(nonsense.getBytes())), "it is not the state of a producer");
    }
    MemoryState unkept = new MemoryState();
    unkept.failWith(new IOException("the disk is full"));
    assertSame(unkept.fails, refused(() -> client.durableProducer("a", unkept), "the disk is full").getCause());
  }

  @Test
  void stateOfAnotherKindOrCutOffIsRefused() throws Exception {
    Journal journal = new Journal();
    Fake fake = producing(journal, DurableTest::acking);
    following(fake, 1);
    WaldClient client = client(fake);
    byte[] producer = savedProducer(StateKind.STATE_KIND_PRODUCER, "0", "1").toByteArray();
    byte[] follower = FollowerState.newBuilder().setCursor(ByteString.copyFromUtf8("1")).setEffects(ByteString.copyFromUtf8("e"))
        .setKind(StateKind.STATE_KIND_FOLLOWER).build().toByteArray();
    List<byte[]> noProducers = new ArrayList<>(List.of(savedProducer(StateKind.STATE_KIND_UNSPECIFIED, "0").toByteArray(), follower));
    IntStream.range(0, producer.length).forEach(length -> noProducers.add(Arrays.copyOf(producer, length)));
    for (byte[] saved : noProducers) {
      refused(() -> client.durableProducer("a", new MemoryState(saved)), "it is not the state of a producer");
    }
    List<byte[]> noFollowers = new ArrayList<>(List.of(producer, "nonsense".getBytes()));
    IntStream.range(0, follower.length).forEach(length -> noFollowers.add(Arrays.copyOf(follower, length)));
    for (byte[] saved : noFollowers) {
      WaldException failure = refused(() -> client.durableFollower("a", new MemoryState(saved)), "it is not the state of a follower");
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
    }
    assertEquals(0, journal.sent());
    client.durableFollower("a", new MemoryState(follower)).close();
    open(client, new MemoryState(producer));
  }

  @Test
  void failedSaveSendsNothingAndEndsTheProducer() throws Exception {
    Journal journal = new Journal();
    WaldClient client = client(producing(journal, DurableTest::acking));
    MemoryState state = new MemoryState();
    DurableProducer producer = open(client, state);
    appendAll(producer, 0, 1);
    IOException full = new IOException("the disk is full");
    state.failWith(full);
    WaldException first = refused(() -> producer.appendBatch("never sent"), "the disk is full");
    assertSame(full, first.getCause());
    assertEquals(Outcome.UNKNOWN, first.outcome());
    state.failWith(null);
    WaldException behind = failureOf(() -> producer.appendBatch("behind"));
    assertEquals(FailureKind.EARLIER_FAILED, behind.kind());
    assertEquals(Outcome.NOT_APPLIED, behind.outcome());
    assertTrue(behind.getMessage().contains("the disk is full"), behind.getMessage());
    assertEquals(FailureKind.STATE, assertInstanceOf(WaldException.class, behind.getCause()).kind());
    assertEquals(FailureKind.EARLIER_FAILED, failureOf(producer::flush).kind());
    assertSame(full, refused(producer::close, "the disk is full").getCause());
    // The program gives the batch again, since its sequence is the next one.
    DurableProducer next = open(client, state);
    appendAll(next, 1, 2);
    next.close();
    assertEquals(numbersTo(2), journal.applied());
  }

  @Test
  void saveThatDiesSendsNothingLater() throws Exception {
    Journal journal = new Journal();
    MemoryState state = new MemoryState();
    DurableProducer producer = open(client(producing(journal, state, DurableTest::acking)), state);
    appendAll(producer, 0, 1);
    state.saving = () -> {
      throw new IllegalStateException("out of something");
    };
    assertThrows(AssertionError.class, () -> producer.appendBatch("never sent"));
    state.saving = () -> {};
    assertEquals(FailureKind.EARLIER_FAILED, failureOf(() -> producer.appendBatch("behind")).kind());
    assertEquals(FailureKind.STATE, failureOf(producer::close).kind());
    assertTrue(journal.sent() <= 1, journal.sent() + " batches were sent");
  }

  @Test
  void refusedBatchEndsTheDurableProducerAndStays() throws Exception {
    Journal journal = new Journal();
    MemoryState state = new MemoryState();
    Fake fake = producing(journal, (stream, count) -> {
      stream.applyAll(1);
      stream.receive();
      Map<String, String> facts = Fake.stated(Outcome.NOT_APPLIED, Retry.NEVER);
      facts.put("request_id", "1");
      throw Fake.refusal(Code.INVALID_ARGUMENT, Reason.RECORD_TOO_LARGE, facts);
    });
    DurableProducer producer = open(client(fake), state);
    appendAll(producer, 0, 2);
    WaldException first = failureOf(producer::flush);
    assertEquals(Reason.RECORD_TOO_LARGE, first.reason());
    assertEquals(FailureKind.SERVER, first.kind());
    WaldException behind = failureOf(() -> producer.appendBatch("x"));
    assertEquals(Reason.RECORD_TOO_LARGE, behind.reason());
    assertEquals(FailureKind.EARLIER_FAILED, behind.kind());
    assertEquals(Reason.RECORD_TOO_LARGE, failureOf(producer::close).reason());
    List<LogBatch> saved = state.producer().getBatchesList();
    assertEquals("1", saved.get(saved.size() - 1).getRecords(0).getData().toStringUtf8());
  }

  /** Runs a call on another thread, and interrupts it once it waits. */
  private static Throwable interrupted(Executable call) throws Exception {
    CompletableFuture<Throwable> ended = new CompletableFuture<>();
    Thread thread = new Thread(() -> {
      try {
        call.execute();
        ended.complete(null);
      } catch (Throwable failure) {
        ended.complete(failure);
      }
    });
    thread.start();
    while (!ended.isDone() && thread.getState() != Thread.State.WAITING && thread.getState() != Thread.State.TIMED_WAITING) {
      Thread.onSpinWait();
    }
    thread.interrupt();
    return ended.get(30, TimeUnit.SECONDS);
  }

  @Test
  void durableProducerKeepsAtMost64BatchesWithoutAnAck() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    Journal journal = new Journal();
    Fake fake = producing(journal, (stream, count) -> {
      ClientTest.await(goOn);
      stream.applyAll(ALWAYS);
    });
    WaldClient client = client(fake);
    MemoryState state = new MemoryState();
    DurableProducer first = open(client, state);
    appendAll(first, 0, DurableProducer.BATCHES_KEPT);
    WaldException noRoom = assertInstanceOf(WaldException.class, interrupted(() -> first.appendBatch("no room")));
    assertEquals(FailureKind.CANCELLED, noRoom.kind());
    assertEquals(Outcome.NOT_APPLIED, noRoom.outcome());
    WaldException notFlushed = assertInstanceOf(WaldException.class, interrupted(first::flush));
    assertEquals(FailureKind.CANCELLED, notFlushed.kind());
    assertEquals(Outcome.UNKNOWN, notFlushed.outcome());
    assertEquals(DurableProducer.BATCHES_KEPT, first.nextSequence());
    WaldException late = failureOf(() -> first.close(Duration.ofMillis(20)));
    assertEquals(FailureKind.TIMEOUT, late.kind());
    assertEquals(Outcome.UNKNOWN, late.outcome());
    // A start that gives up leaves the batches in the state.
    ProducerOptions two = ProducerOptions.DEFAULT.inFlight(2, 1 << 20);
    WaldException gaveUp = assertInstanceOf(WaldException.class, interrupted(() -> client.durableProducer("a", state, two)));
    assertEquals(FailureKind.CANCELLED, gaveUp.kind());
    goOn.countDown();
    DurableProducer producer = open(client, state, two);
    assertEquals(FailureKind.USAGE, failureOf(() -> producer.appendBatch(List.of())).kind());
    assertEquals(DurableProducer.BATCHES_KEPT, producer.nextSequence());
    appendAll(producer, DurableProducer.BATCHES_KEPT, 100);
    producer.close();
    assertEquals(numbersTo(100), journal.applied());
  }

  /** Refuses the first batch with this outcome once the latch is open. */
  private Fake refusing(Outcome outcome, CountDownLatch goOn) throws IOException {
    return producing(new Journal(), (stream, count) -> {
      stream.receive();
      ClientTest.await(goOn);
      Map<String, String> facts = Fake.stated(outcome, Retry.NEVER);
      facts.put("request_id", "0");
      throw Fake.refusal(Code.INVALID_ARGUMENT, Reason.RECORD_TOO_LARGE, facts);
    });
  }

  private static void awaitAnswer(DurableProducer producer) throws Exception {
    producer.firstAnswer().handle((ack, failure) -> ack).get(30, TimeUnit.SECONDS);
  }

  @Test
  void batchThatWasKeptBehindAFailureHasAnUnknownOutcome() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    MemoryState state = new MemoryState();
    DurableProducer producer = open(client(refusing(Outcome.NOT_APPLIED, goOn)), state);
    appendAll(producer, 0, 1);
    // The first batch fails while the second is being saved.
    state.saving = () -> {
      goOn.countDown();
      awaitAnswer(producer);
    };
    WaldException failure = failureOf(() -> producer.appendBatch("1"));
    assertEquals(Outcome.UNKNOWN, failure.outcome());
    assertEquals(Retry.SAFE_WITH_CONDITION, failure.retry());
    assertEquals(FailureKind.EARLIER_FAILED, failure.kind());
    assertEquals(Reason.RECORD_TOO_LARGE, failure.reason());
    assertEquals(Outcome.NOT_APPLIED, assertInstanceOf(WaldException.class, failure.getCause()).outcome());
    assertEquals(2, state.producer().getBatchesCount());
  }

  @Test
  void batchThatWasNotKeptWasNotApplied() throws Exception {
    CountDownLatch goOn = new CountDownLatch(1);
    MemoryState state = new MemoryState();
    WaldClient client = client(refusing(Outcome.UNKNOWN, goOn));
    DurableProducer producer = open(client, state);
    appendAll(producer, 0, 1);
    goOn.countDown();
    awaitAnswer(producer);
    for (int i = 0; i < 2; i++) {
      WaldException failure = failureOf(() -> producer.appendBatch("1"));
      assertEquals(Outcome.NOT_APPLIED, failure.outcome());
      assertEquals(FailureKind.EARLIER_FAILED, failure.kind());
      assertEquals(Reason.RECORD_TOO_LARGE, failure.reason());
    }
    WaldException first = failureOf(producer::close);
    assertEquals(Outcome.UNKNOWN, first.outcome());
    assertEquals(1, state.producer().getBatchesCount());
  }

  @Test
  void durableProducerOfAClosedClientKeepsItsBatches() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    MemoryState state = new MemoryState();
    Fake fake = producing(new Journal(), (stream, count) -> {
      stream.receive();
      arrived.countDown();
      stream.awaitEnd();
    });
    WaldClient client = client(fake);
    DurableProducer producer = open(client, state);
    appendAll(producer, 0, 1);
    ClientTest.await(arrived);
    client.close();
    WaldException flushed = failureOf(producer::flush);
    assertEquals(FailureKind.CLOSED, flushed.kind());
    assertEquals(Outcome.UNKNOWN, flushed.outcome());
    WaldException failure = failureOf(() -> producer.appendBatch("1"));
    assertEquals(FailureKind.CLOSED, failure.kind());
    assertEquals(Outcome.NOT_APPLIED, failure.outcome());
    assertEquals(1, state.producer().getBatchesCount());
  }

  @Test
  void stateWithBatchesIsSavedBeforeTheyAreSent() throws Exception {
    MemoryState state = stateWith("0", "1");
    Journal journal = new Journal();
    WaldClient client = client(producing(journal, (stream, count) -> {
      if (state.saves() == 0) {
        wrong.add(new AssertionError("sent before it was saved"));
      }
      stream.applyAll(ALWAYS);
    }));
    byte[] before = state.load().orElseThrow();
    state.failWith(new IOException("the disk is full"));
    refused(() -> client.durableProducer("a", state), "the disk is full");
    state.failWith(null);
    DurableProducer producer = open(client, state);
    assertEquals(1, state.saves());
    assertArrayEquals(before, state.load().orElseThrow());
    producer.close();
    assertEquals(numbersTo(2), journal.applied());
    assertEquals(2, journal.sent());
    int saves = state.saves();
    open(client, state);
    assertEquals(saves, state.saves());
  }

  @Test
  void writerEpochIsOnEveryBatchOfADurableProducer() throws Exception {
    BlockingQueue<Optional<Long>> epochs = new LinkedBlockingQueue<>();
    Fake fake = fake();
    fake.session = stream -> {
      for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
        var condition = request.getBatch().getBatches(0).getCondition();
        epochs.add(condition.hasWriterEpoch() ? Optional.of(condition.getWriterEpoch()) : Optional.empty());
        stream.send(Fake.ackOf(request, request.getRequestId()));
      }
      stream.end();
    };
    WaldClient client = client(fake);
    DurableProducer producer = open(client, stateWith("0", "1"), ProducerOptions.DEFAULT.writerEpoch(4));
    appendAll(producer, 2, 3);
    producer.close();
    open(client, stateWith("0")).close();
    assertEquals(List.of(Optional.of(4L), Optional.of(4L), Optional.of(4L), Optional.empty()), List.copyOf(epochs));
  }

  @Test
  void forgottenProducerWithNothingInDoubtGoesOnInANewEpoch() throws Exception {
    Journal journal = new Journal();
    MemoryState state = new MemoryState();
    WaldClient client = client(producing(journal, state, DurableTest::acking));
    DurableProducer producer = open(client, state);
    String id = producer.id();
    for (int life = 0; life < 3; life++) {
      // In one run of the program, and over its restarts.
      for (int half = 0; half < 2; half++) {
        long first = 20 * life + 10 * half;
        assertEquals(first, producer.nextSequence());
        appendAll(producer, first, first + 10);
        producer.flush();
        journal.forget();
      }
      producer.close();
      producer = open(client, state);
    }
    appendAll(producer, 60, 61);
    producer.close();
    assertEquals(numbersTo(61), journal.applied());
    ProducerState expected = ProducerState.newBuilder().setLog("a").setLogId(9).setId(id).setEpoch(6).setEarlierBatches(60).setSequence(1)
        .setKind(StateKind.STATE_KIND_PRODUCER).build();
    assertEquals(expected, state.producer());
  }

  @ParameterizedTest
  @CsvSource({"60,512,1", "200,512,0", "200,3,0"})
  void batchesBehindARefusedOneFollowItIntoTheNewEpoch(int count, int inFlight, int acked) throws Exception {
    // The batch in doubt is acked before the refusal.
    MemoryState state = stateWith("0");
    CountDownLatch goOn = new CountDownLatch(1);
    Journal journal = new Journal();
    WaldClient client = client(producing(journal, state, (stream, number) -> {
      if (number == 1) {
        stream.applyAll(1);
        ClientTest.await(goOn);
        stream.applyAll(acked);
        journal.forget();
      }
      stream.applyAll(ALWAYS);
    }));
    DurableProducer producer = open(client, state, ProducerOptions.DEFAULT.inFlight(inFlight, 1 << 20));
    producer.flush();
    // The refusal comes when many batches are underway.
    int underway = Math.min(count - 1, Math.min(inFlight, DurableProducer.BATCHES_KEPT));
    appendAll(producer, 1, 1 + underway);
    goOn.countDown();
    appendAll(producer, 1 + underway, count);
    producer.flush();
    assertEquals(numbersTo(count), journal.applied());
    assertEquals(count, producer.nextSequence());
    ProducerState expected = ProducerState.newBuilder().setLog("a").setLogId(9).setId("p").setEpoch(1).setEarlierBatches(1 + acked)
        .setSequence(count - 1 - acked).setKind(StateKind.STATE_KIND_PRODUCER).build();
    assertEquals(expected, state.producer());
  }

  private void refusedAsExpired(DurableProducer producer, Journal journal, MemoryState state) throws Exception {
    assertEquals(Reason.PRODUCER_EXPIRED, failureOf(producer::flush).reason());
    assertEquals(Reason.PRODUCER_EXPIRED, failureOf(producer::close).reason());
    assertEquals(0, state.producer().getEpoch());
    assertEquals(1, state.producer().getBatchesCount());
    assertEquals(numbersTo(1), journal.applied());
  }

  @Test
  void forgottenProducerWithABatchOfAnEarlierRunIsRefused() throws Exception {
    CountDownLatch arrived = new CountDownLatch(1);
    Journal journal = new Journal();
    WaldClient client = client(producing(journal, (stream, count) -> {
      if (count > 1) {
        stream.applyAll(ALWAYS);
        return;
      }
      journal.apply(stream.receive());
      arrived.countDown();
      stream.awaitEnd();
    }));
    MemoryState state = new MemoryState();
    DurableProducer producer = open(client, state);
    appendAll(producer, 0, 1);
    ClientTest.await(arrived);
    producer.abort();
    journal.forget();
    for (int i = 0; i < 2; i++) {
      refusedAsExpired(open(client, state), journal, state);
    }
  }

  @Test
  void forgottenProducerWithABatchOnALostConnectionIsRefused() throws Exception {
    Journal journal = new Journal();
    Fake[] fake = new Fake[1];
    fake[0] = producing(journal, (stream, count) -> {
      if (count > 1) {
        stream.applyAll(ALWAYS);
        return;
      }
      journal.apply(stream.receive());
      journal.forget();
      fake[0].drop();
    });
    MemoryState state = new MemoryState();
    DurableProducer producer = open(client(fake[0]), state);
    appendAll(producer, 0, 1);
    refusedAsExpired(producer, journal, state);
  }

  @Test
  void producerDoesNotCancelAStreamWhileItStarts() throws Exception {
    CompletableFuture<Thread> closing = new CompletableFuture<>();
    CountDownLatch starting = new CountDownLatch(1);
    AtomicInteger early = new AtomicInteger();
    ClientInterceptor slow = new ClientInterceptor() {
      @Override
      public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
        boolean session = method.getBareMethodName().equals("AppendSession");
        return new ForwardingClientCall.SimpleForwardingClientCall<>(next.newCall(method, options)) {
          private volatile boolean started = !session;

          @Override
          public void start(Listener<A> listener, Metadata headers) {
            if (session) {
              starting.countDown();
              // The close has then done its part.
              Thread thread = closing.join();
              while (thread.getState() != Thread.State.WAITING) {
                Thread.onSpinWait();
              }
            }
            super.start(listener, headers);
            started = true;
          }

          @Override
          public void cancel(String message, Throwable cause) {
            if (!started) {
              early.incrementAndGet();
            }
            super.cancel(message, cause);
          }
        };
      }
    };
    Fake fake = producing(new Journal(), (stream, count) -> stream.awaitEnd());
    WaldClient client = fake.builder().intercept(slow).build();
    opened.add(client);
    DurableProducer producer = open(client, new MemoryState());
    appendAll(producer, 0, 1);
    ClientTest.await(starting);
    CompletableFuture<Void> closed = new CompletableFuture<>();
    Thread thread = new Thread(() -> {
      producer.abort();
      closed.complete(null);
    });
    thread.start();
    closing.complete(thread);
    closed.get(30, TimeUnit.SECONDS);
    assertEquals(0, early.get());
  }

  /** Lets a fake have a log of this many records, one per message. A scan begins behind its cursor. */
  private static void following(Fake fake, int count) {
    fake.scan = (request, stream) -> {
      String cursor = request.getCursor().toStringUtf8();
      for (int lsn = cursor.isEmpty() ? 0 : Integer.parseInt(cursor); lsn < count; lsn++) {
        String next = String.valueOf(lsn + 1);
        stream.send(Fake.messageOf(lsn, next));
        stream.send(ScanResponse.newBuilder().setCursor(ByteString.copyFromUtf8(next)).setCaughtUp(lsn % 2 == 0).build());
      }
    };
  }

  private DurableFollower follow(WaldClient client, State state) {
    DurableFollower follower = client.durableFollower("a", state, ScanOptions.DEFAULT.fromLsn(0));
    opened.add(follower);
    return follower;
  }

  /** Takes the next event, which has one record. */
  private static long lsnOf(DurableFollower follower) {
    ScanEvent event = follower.next(Duration.ofSeconds(30)).orElseThrow();
    assertEquals(List.of(), event.gaps());
    assertEquals(1, event.recordCount());
    return event.batches().get(0).records().get(0).lsn();
  }

  @Test
  void followerGoesOnBehindTheEffectsThatItHasKept() throws Exception {
    int count = 12;
    Fake fake = fake();
    following(fake, count);
    WaldClient client = client(fake);
    MemoryState state = new MemoryState();
    List<String> kept = new ArrayList<>();
    int seen = 0;
    for (int starts = 0; kept.size() < count; starts++) {
      DurableFollower follower = follow(client, state);
      Optional<ByteString> expected = starts == 0 ? Optional.empty() : Optional.of(ByteString.copyFromUtf8(String.join(" ", kept)));
      assertEquals(expected, follower.effects());
      // Each start takes two records, and keeps the effects of the first: the second comes again.
      kept.add(String.valueOf(lsnOf(follower)));
      seen++;
      follower.keep(String.join(" ", kept));
      assertEquals(String.join(" ", kept), follower.effects().orElseThrow().toStringUtf8());
      if (kept.size() < count) {
        lsnOf(follower);
        seen++;
      }
      follower.close();
    }
    assertEquals(numbersTo(count), kept);
    assertEquals(2 * count - 1, seen);
    // A cursor, effects and kind, as any encoder of the contract writes them.
    byte[] effects = String.join(" ", kept).getBytes();
    byte[] expected = bytes(IntStream.concat(IntStream.concat(IntStream.of(0x0a, 2, '1', '2', 0x12, effects.length),
        IntStream.range(0, effects.length).map(i -> effects[i])), IntStream.of(0x78, 2)).toArray());
    assertArrayEquals(expected, state.load().orElseThrow());
  }

  @Test
  void followerReportsAStateThatFails() throws Exception {
    Fake fake = fake();
    following(fake, 1);
    MemoryState state = new MemoryState();
    state.failWith(new IOException("the disk is full"));
    DurableFollower follower = follow(client(fake), state);
    assertEquals(Optional.empty(), follower.cursor());
    lsnOf(follower);
    WaldException failure = refused(() -> follower.keep("x"), "the disk is full");
    assertEquals(Outcome.UNKNOWN, failure.outcome());
    assertSame(state.fails, failure.getCause());
    assertEquals(Optional.empty(), follower.effects());
    state.failWith(null);
    follower.keep(new byte[0]);
    assertEquals(Optional.of(ByteString.EMPTY), follower.effects());
    assertEquals(Optional.empty(), follower.next(Duration.ofMillis(20)));
    assertFalse(follower.isEnded());
  }

  /** A fake whose scan has a gap of two reasons before its second record. */
  private Fake withGaps() throws IOException {
    ScanResponse.Builder behind = Fake.messageOf(7, "two").toBuilder();
    dev.wald.v1.Gap.Builder gap = dev.wald.v1.Gap.newBuilder().setLog("a");
    behind.addGaps(gap.setFromLsn(1).setToLsn(5).setReason(dev.wald.v1.GapReason.GAP_REASON_EXPIRED));
    behind.addGaps(gap.setFromLsn(5).setToLsn(7).setReason(dev.wald.v1.GapReason.GAP_REASON_LOST));
    Fake fake = fake();
    fake.scan = (request, stream) -> {
      List.of(Fake.messageOf(0, "one"), behind.build(), Fake.messageOf(8, "three")).forEach(stream::send);
      stream.end();
    };
    return fake;
  }

  @Test
  void gapIsAFailureAndTheNextCallGoesOn() throws Exception {
    DurableFollower follower =
        client(withGaps()).durableFollower("a", new MemoryState(), ScanOptions.DEFAULT.fromLsn(0).untilLsn(9));
    opened.add(follower);
    assertEquals(0, lsnOf(follower));
    for (GapReason reason : List.of(GapReason.EXPIRED, GapReason.LOST)) {
      WaldException failure = failureOf(follower::next);
      assertEquals(FailureKind.MISSING, failure.kind());
      assertEquals(reason, failure.gap().orElseThrow().reason());
      assertTrue(failure.getMessage().contains("log \"a\""), failure.getMessage());
      // The records behind the gap have not been returned.
      assertEquals("one", follower.cursor().orElseThrow().toStringUtf8());
    }
    assertEquals(7, lsnOf(follower));
    assertEquals("two", follower.cursor().orElseThrow().toStringUtf8());
    assertEquals(8, lsnOf(follower));
    assertEquals(Optional.empty(), follower.next());
    assertTrue(follower.isEnded());
  }

  @Test
  void iterationKeepsOnlyTheCursorOfTakenEvents() throws Exception {
    Fake fake = fake();
    following(fake, 3);
    MemoryState state = new MemoryState();
    DurableFollower follower = follow(client(fake), state);
    var events = follower.iterator();
    assertEquals(0, events.next().batches().get(0).records().get(0).lsn());
    assertTrue(events.hasNext());
    follower.keep("0");
    assertEquals("1", FollowerState.parseFrom(state.load().orElseThrow()).getCursor().toStringUtf8());
    assertEquals(1, events.next().batches().get(0).records().get(0).lsn());
    assertEquals(2, lsnOf(follower));
    follower.close();
    assertFalse(events.hasNext());
  }

  @Test
  void fileStateIsReplacedAtomicallyAndBelongsToItsOwner() throws Exception {
    Path path = directory.resolve("producer.state");
    FileState state = FileState.of(path);
    assertTrue(state.load().isEmpty());
    Object earlier = null;
    for (String text : List.of("first", "second, longer", "3", "")) {
      state.save(text.getBytes());
      state.release();
      assertArrayEquals(text.getBytes(), state.load().orElseThrow());
      // A reader that has the earlier file open reads all of it.
      Object later = Files.getAttribute(path, "unix:ino");
      assertNotEquals(earlier, later);
      earlier = later;
      for (Path file : List.of(path, directory.resolve("producer.state.lock"))) {
        assertEquals("rw-------", PosixFilePermissions.toString(Files.getPosixFilePermissions(file)));
      }
    }
    try (var files = Files.list(directory)) {
      assertEquals(2, files.count());
    }
    // A save that fails leaves the state as it was.
    Files.createDirectory(directory.resolve("producer.state.new"));
    assertTrue(assertThrows(IOException.class, () -> state.save("lost".getBytes())).getMessage().contains("producer.state"));
    state.release();
    assertArrayEquals(new byte[0], state.load().orElseThrow());
    state.release();
    IOException absent = assertThrows(IOException.class, () -> FileState.of(directory.resolve("no/a.state")).load());
    assertTrue(absent.getMessage().endsWith("a.state: no such file or directory"), absent.getMessage());
  }

  @Test
  void interruptDoesNotEndASave() throws Exception {
    FileState state = FileState.of(directory.resolve("a.state"));
    Thread.currentThread().interrupt();
    state.save("kept".getBytes());
    assertTrue(Thread.interrupted());
    assertArrayEquals("kept".getBytes(), state.load().orElseThrow());
    state.release();
  }

  @Test
  void fileStateIsUsedByOneAtATime() throws Exception {
    Fake fake = producing(new Journal(), DurableTest::acking);
    following(fake, 1);
    WaldClient client = client(fake);
    Path path = directory.resolve("producer.state");
    FileState state = FileState.of(path);
    DurableProducer producer = open(client, state);
    for (int i = 0; i < 2; i++) {
      for (State again : List.of(FileState.of(path), FileState.of(path.getParent().resolve("../" + path.getParent().getFileName())
          .resolve(path.getFileName())), state)) {
        refused(() -> client.durableProducer("a", again), IN_USE);
      }
      appendAll(producer, producer.nextSequence(), producer.nextSequence() + 1);
      producer.close();
      DurableProducer last = producer;
      producer = open(client, state);
      // It does not release the lock of another one.
      last.abort();
      last.close();
    }
    // A failure does not leave the lock behind.
    producer.close();
    refused(() -> client.durableProducer("other", FileState.of(path)), "\"a\"");
    ProducerOptions none = ProducerOptions.DEFAULT.inFlight(0, 0);
    assertEquals(FailureKind.USAGE, failureOf(() -> client.durableProducer("a", FileState.of(path), none)).kind());
    refused(() -> client.durableFollower("a", FileState.of(path)), "it is not the state of a follower");
    open(client, FileState.of(path)).close();
    assertTrue(Files.exists(directory.resolve("producer.state.lock")));

    Path other = directory.resolve("follower.state");
    for (int i = 0; i < 2; i++) {
      DurableFollower follower = follow(client, FileState.of(other));
      refused(() -> client.durableFollower("a", FileState.of(other)), IN_USE);
      follower.keep("x");
      follower.close();
      follower.close();
      // Another one may have the state by now.
      assertEquals(FailureKind.CLOSED, failureOf(() -> follower.keep("late")).kind());
    }
    assertEquals("x", follow(client, FileState.of(other)).effects().orElseThrow().toStringUtf8());
  }

  @Test
  void linkToFileStateStaysAndItsTargetHasTheStateAndTheLock() throws Exception {
    Path target = directory.resolve("target");
    Path link = Files.createSymbolicLink(directory.resolve("link"), Path.of("middle"));
    Files.createSymbolicLink(directory.resolve("middle"), target);
    // Once without a target, once with one.
    for (String text : List.of("1", "2")) {
      FileState state = FileState.of(link);
      state.load();
      state.save(text.getBytes(StandardCharsets.UTF_8));
      assertTrue(Files.isSymbolicLink(link));
      assertEquals(text, Files.readString(target));
      assertThrows(IOException.class, () -> FileState.of(target).load());
      state.release();
    }
  }

  /** Takes the lock of a state in a process of its own. */
  public static final class Taker {
    private Taker() {}

    public static void main(String[] arguments) throws Exception {
      FileState state = FileState.of(arguments[0]);
      state.load();
      System.out.println("taken");
      // The parent ends this process.
      System.in.read();
    }
  }

  @Test
  void fileStateOfAnotherProcessIsRefusedUntilItEnds() throws Exception {
    Path path = directory.resolve("a.state");
    FileState state = FileState.of(path);
    List<String> command = List.of(Path.of(System.getProperty("java.home"), "bin", "java").toString(), "-XX:TieredStopAtLevel=1", "-cp",
        System.getProperty("java.class.path"), Taker.class.getName(), path.toString());
    state.load();
    // A refusal here must not take the lock away: POSIX would, if the file were closed.
    assertThrows(IOException.class, () -> FileState.of(path).load());
    URL classes = FileState.class.getProtectionDomain().getCodeSource().getLocation();
    try (URLClassLoader loader = new URLClassLoader(new URL[] {classes}, ClassLoader.getPlatformClassLoader())) {
      // The package may be in this process twice.
      Class<?> copy = loader.loadClass(FileState.class.getName());
      assertNotEquals(FileState.class, copy);
      Object again = copy.getMethod("of", Path.class).invoke(null, path);
      Throwable failure = assertThrows(InvocationTargetException.class, () -> copy.getMethod("load").invoke(again)).getCause();
      assertTrue(failure.getMessage().contains(IN_USE), failure.getMessage());
    }
    Process refused = new ProcessBuilder(command).redirectErrorStream(true).start();
    // It ends also if it is not refused.
    refused.getOutputStream().close();
    String said = new String(refused.getInputStream().readAllBytes());
    assertTrue(said.contains(IN_USE), said);
    assertEquals(1, refused.waitFor());
    state.release();
    Process taker = new ProcessBuilder(command).redirectErrorStream(true).start();
    try {
      assertEquals("taken", taker.inputReader().readLine());
      assertTrue(assertThrows(IOException.class, state::load).getMessage().contains(IN_USE));
    } finally {
      taker.destroyForcibly().waitFor();
    }
    assertTrue(state.load().isEmpty());
    state.release();
  }
}
