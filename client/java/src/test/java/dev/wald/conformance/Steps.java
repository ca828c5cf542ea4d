package dev.wald.conformance;

import static dev.wald.conformance.Describe.number;
import static dev.wald.conformance.Describe.object;

import dev.wald.Ack;
import dev.wald.AppendOptions;
import dev.wald.Batch;
import dev.wald.BatchAck;
import dev.wald.Check;
import dev.wald.Condition;
import dev.wald.CursorCommit;
import dev.wald.Durability;
import dev.wald.FenceInfo;
import dev.wald.FenceOptions;
import dev.wald.Header;
import dev.wald.ListOptions;
import dev.wald.LogAck;
import dev.wald.LogInfo;
import dev.wald.Logs;
import dev.wald.NewRecord;
import dev.wald.Page;
import dev.wald.Producer;
import dev.wald.ProducerOptions;
import dev.wald.ReadOptions;
import dev.wald.Reason;
import dev.wald.RetryPolicy;
import dev.wald.Scan;
import dev.wald.ScanOptions;
import dev.wald.Sequence;
import dev.wald.Session;
import dev.wald.TailInfo;
import dev.wald.TailOptions;
import dev.wald.WaldClient;
import dev.wald.WaldException;
import dev.wald.v1.LogConfig;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;

/** The actions of the steps, by the package's public classes only. */
final class Steps {
  /** Maximum wait of {@code followed}, {@code consume} and {@code wait_tail}. */
  static final long PATIENCE_SECONDS = 20;
  /** Number of batches whose repeats the server recognises. */
  private static final int IN_FLIGHT = 1024;
  private static final HttpClient HTTP = HttpClient.newHttpClient();

  private final WaldClient client;
  private final Map<String, Follower> followers = new ConcurrentHashMap<>();
  private final Map<String, Producer> producers = new ConcurrentHashMap<>();

  Steps(WaldClient client) {
    this.client = client;
  }

  /** Frees the resources that the case has left open. */
  void close() throws InterruptedException {
    for (Follower follower : followers.values()) {
      follower.close();
    }
    for (Producer producer : producers.values()) {
      try {
        // No step waits for batches that are not acked by now.
        producer.close(Duration.ZERO);
      } catch (WaldException failed) {
        // The steps have seen the failure, or did not ask for it.
        continue;
      }
    }
  }

  Map<String, Object> run(String action, Arguments a) throws Exception {
    return switch (action) {
      case "append" -> append(a);
      case "append_batch" -> Describe.ack(client.appendBatch(batch(a)));
      case "session" -> session(a);
      case "read" -> read(a);
      case "scan" -> scan(a);
      case "follow" -> {
        followers.put(a.text("as"), new Follower(client.follow(logs(a), scanOptions(a))));
        yield object();
      }
      case "followed" ->
          followers.get(a.text("follower")).await(a.number("count"), a.number("gaps"), a.flag("caught_up"), PATIENCE_SECONDS);
      case "unfollow" -> {
        followers.remove(a.text("follower")).close();
        yield object();
      }
      case "consume" -> Consumer.consume(client, logs(a), scanOptions(a), a.number("count"), a.text("counting"));
      case "tail" -> tail(a);
      case "wait_tail" -> waitTail(a);
      case "fence" -> fence(a);
      case "trim" -> object("first_lsn", number(a.has("log_id")
          ? client.trim(a.text("log"), a.number("before_lsn"), a.number("log_id"))
          : client.trim(a.text("log"), a.number("before_lsn"))));
      case "sync" -> {
        client.sync(a.text("log"));
        yield object();
      }
      case "create_log" -> object("log_id", number(client.createLog(a.text("log")).logId()));
      case "update_log" -> {
        LogConfig config = LogConfig.newBuilder().setMaxRecordBytes((int) a.number("max_record_bytes")).build();
        yield describe(client.updateLog(a.text("log"), config, "max_record_bytes"));
      }
      case "get_log" -> describe(client.getLog(a.text("log")));
      case "delete_log" -> {
        if (a.has("log_id")) {
          client.deleteLog(a.text("log"), a.number("log_id"));
        } else {
          client.deleteLog(a.text("log"));
        }
        yield object();
      }
      case "list_producers" -> object("producers", client.listProducers(a.text("log"), list(a).pageSize((int) a.number("page_size")))
          .<Object>map(found -> object("id", found.id(), "epoch", number(found.epoch()), "next_sequence", number(found.nextSequence())))
          .toList());
      case "forget_producer" -> {
        if (a.has("log_id")) {
          client.forgetProducer(a.text("log"), a.text("id"), a.number("log_id"));
        } else {
          client.forgetProducer(a.text("log"), a.text("id"));
        }
        yield object();
      }
      // A producer has no linger.
      case "defaults" -> object("batches_in_flight", number(Producer.DEFAULT_BATCHES_IN_FLIGHT),
          "bytes_in_flight", number(Producer.DEFAULT_BYTES_IN_FLIGHT), "linger_ms", number(0),
          "attempts", number(RetryPolicy.DEFAULT.maxAttempts()), "timeout_ms", number(WaldClient.DEFAULT_TIMEOUT.toMillis()),
          "retry_for_ms", number(Producer.DEFAULT_DELIVERY_TIMEOUT.toMillis()));
      case "commit_cursor" -> Describe.cursor(client.commitCursor(commit(a)));
      case "get_cursor" -> Describe.cursor(a.has("log_id")
          ? client.getCursor(a.text("log"), a.text("cursor"), a.number("log_id"))
          : client.getCursor(a.text("log"), a.text("cursor")));
      case "delete_cursor" -> {
        if (a.has("log_id")) {
          client.deleteCursor(a.text("log"), a.text("cursor"), a.number("log_id"));
        } else {
          client.deleteCursor(a.text("log"), a.text("cursor"));
        }
        yield object();
      }
      case "list_cursors" -> object("cursors", client.listCursors(a.text("log"), list(a)).<Object>map(Describe::cursor).toList());
      case "producer" -> {
        ProducerOptions options = ProducerOptions.DEFAULT.inFlight(IN_FLIGHT, Producer.DEFAULT_BYTES_IN_FLIGHT);
        options = a.has("id") ? options.id(a.text("id"), a.number("epoch")) : options;
        options = a.has("log_id") ? options.logId(a.number("log_id")) : options;
        producers.put(a.text("as"), client.producer(a.text("log"), options));
        yield object();
      }
      case "close_producer" -> {
        producers.get(a.text("producer")).close();
        yield object();
      }
      case "produce" -> produce(a);
      case "produce_many" -> produceMany(a);
      case "connect" -> connect(a);
      case "control" -> control(a);
      default -> throw new Wrong("unknown");
    };
  }

  private Map<String, Object> append(Arguments a) {
    NewRecord record = records(List.of(a.members().get("record"))).get(0);
    Ack ack = client.append(a.text("log"), record, new AppendOptions(condition(a.object("condition")), durability(a)));
    return object("lsn", number(ack.lsn()), "deduplicated", ack.deduplicated(), "durability", ack.durability().name(),
        "durable_lsn", number(ack.durableLsn()), "replicated_lsn", number(ack.replicatedLsn().orElse(0)), "log_id", number(ack.logId()));
  }

  private Map<String, Object> session(Arguments a) throws InterruptedException {
    List<Batch> batches = a.objects("requests").stream().map(Steps::batch).toList();
    List<CompletableFuture<BatchAck>> answers = new ArrayList<>();
    Map<String, Object> result = object();
    Session session = client.session();
    for (Batch batch : batches) {
      try {
        answers.add(session.send(batch));
      } catch (WaldException failed) {
        // The session has failed already; the answers of earlier batches report it.
        break;
      }
    }
    WaldException closing = null;
    try {
      session.close();
    } catch (WaldException failed) {
      closing = failed;
    }
    List<Object> acks = new ArrayList<>();
    for (int i = 0; i < answers.size(); i++) {
      try {
        acks.add(Describe.ack(answers.get(i).get()));
      } catch (ExecutionException failed) {
        if (!result.containsKey("error")) {
          Map<String, Object> error = Describe.failure((WaldException) failed.getCause());
          error.put("request", number(i));
          result.put("error", error);
        }
      }
    }
    if (closing != null && !result.containsKey("error")) {
      throw closing;
    }
    result.put("acks", acks);
    return result;
  }

  private Map<String, Object> read(Arguments a) {
    ReadOptions options = ReadOptions.DEFAULT;
    options = a.has("lsn") ? options.fromLsn(a.number("lsn")) : options;
    options = a.has("timestamp_us") ? options.fromTime(time(a.number("timestamp_us"))) : options;
    options = a.has("tail_offset") ? options.last(a.number("tail_offset")) : options;
    options = a.has("max_records") ? options.maxRecords((int) a.number("max_records")) : options;
    options = a.has("wait_ms") ? options.maxWait(Duration.ofMillis(a.number("wait_ms"))) : options;
    options = a.has("log_id") ? options.logId(a.number("log_id")) : options;
    Page page = client.read(a.text("log"), options);
    return object("records", page.records().stream().<Object>map(record -> Describe.record(null, record)).toList(),
        "next_lsn", number(page.nextLsn()), "tail_lsn", number(page.tailLsn()), "first_lsn", number(page.firstLsn()),
        "durable_lsn", number(page.durableLsn()), "replicated_lsn", number(page.replicatedLsn().orElse(0)));
  }

  private static Instant time(long micros) {
    return Instant.EPOCH.plus(micros, ChronoUnit.MICROS);
  }

  private static Logs logs(Arguments a) {
    if (a.has("log")) {
      return Logs.named(a.text("log"));
    }
    return a.has("prefix") ? Logs.withPrefix(a.text("prefix")) : Logs.all();
  }

  private static ScanOptions scanOptions(Arguments a) {
    ScanOptions options = ScanOptions.DEFAULT;
    options = a.has("lsn") ? options.fromLsn(a.number("lsn")) : options;
    options = a.has("timestamp_us") ? options.fromTime(time(a.number("timestamp_us"))) : options;
    options = a.has("tail_offset") ? options.last(a.number("tail_offset")) : options;
    options = a.has("cursor") ? options.after(a.bytes("cursor")) : options;
    options = a.has("until_lsn") ? options.untilLsn(a.number("until_lsn")) : options;
    options = a.has("max_records") ? options.maxRecords(a.number("max_records")) : options;
    return a.has("log_id") ? options.logId(a.number("log_id")) : options;
  }

  private Map<String, Object> scan(Arguments a) {
    Follower.Seen seen = new Follower.Seen();
    try (Scan scan = client.scan(logs(a), scanOptions(a))) {
      scan.forEach(seen::add);
    }
    return seen.describe();
  }

  private Map<String, Object> tail(Arguments a) {
    TailOptions options = a.has("log_id") ? TailOptions.DEFAULT.logId(a.number("log_id")) : TailOptions.DEFAULT;
    TailInfo tail = client.tail(a.text("log"), options);
    return object("first_lsn", number(tail.firstLsn()), "tail_lsn", number(tail.tailLsn()), "durable_lsn", number(tail.durableLsn()),
        "replicated_lsn", number(tail.replicatedLsn().orElse(0)), "writer_epoch", number(tail.writerEpoch()), "log_id", number(tail.logId()));
  }

  private Map<String, Object> waitTail(Arguments a) throws InterruptedException {
    long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(PATIENCE_SECONDS);
    for (;;) {
      String found;
      try {
        long tail = client.tail(a.text("log")).tailLsn();
        if (tail >= a.number("at_least")) {
          return object();
        }
        found = "the tail is " + tail;
      } catch (WaldException failed) {
        found = failed.getMessage();
      }
      if (System.nanoTime() > deadline) {
        throw new Wrong(found + " after " + PATIENCE_SECONDS + " s");
      }
      Thread.sleep(2);
    }
  }

  private Map<String, Object> fence(Arguments a) {
    FenceOptions options = FenceOptions.DEFAULT;
    options = a.has("writer_epoch") ? options.writerEpoch(a.number("writer_epoch")) : options;
    options = a.has("log_id") ? options.logId(a.number("log_id")) : options;
    FenceInfo fence = client.fence(a.text("log"), options);
    return object("tail_lsn", number(fence.tailLsn()), "writer_epoch", number(fence.writerEpoch()), "log_id", number(fence.logId()));
  }

  private static Map<String, Object> describe(LogInfo log) {
    return object("log_id", number(log.logId()), "max_record_bytes", number(Integer.toUnsignedLong(log.config().getMaxRecordBytes())));
  }

  private static ListOptions list(Arguments a) {
    return a.has("log_id") ? ListOptions.DEFAULT.logId(a.number("log_id")) : ListOptions.DEFAULT;
  }

  private Map<String, Object> produce(Arguments a) {
    AppendOptions options = AppendOptions.DEFAULT;
    options = a.has("writer_epoch") ? options.writerEpoch(a.number("writer_epoch")) : options;
    options = a.has("expected_lsn") ? options.expectLsn(a.number("expected_lsn")) : options;
    LogAck ack = producers.get(a.text("producer")).append(records(a.list("records")), options);
    return object("first_lsn", number(ack.firstLsn()), "next_lsn", number(ack.nextLsn()), "deduplicated", ack.deduplicated());
  }

  private Map<String, Object> produceMany(Arguments a) throws InterruptedException {
    Producer producer = producers.get(a.text("producer"));
    Deque<CompletableFuture<LogAck>> answers = new ArrayDeque<>();
    long acked = 0;
    boolean ascend = true;
    long next = 0;
    long sent = 0;
    while (sent < a.number("count") || !answers.isEmpty()) {
      if (sent < a.number("count") && answers.size() < a.number("in_flight")) {
        answers.add(producer.send(a.text("prefix") + sent));
        sent++;
        continue;
      }
      try {
        LogAck ack = answers.poll().get();
        ascend &= acked == 0 || ack.firstLsn() >= next;
        next = ack.nextLsn();
        acked++;
      } catch (ExecutionException failed) {
        if (failed.getCause() instanceof WaldException failure) {
          throw failure;
        }
        throw new Wrong("after " + acked + " acks", failed);
      }
    }
    return object("acked", number(acked), "lsns_ascend", ascend);
  }

  /** Makes another client, and asks for the tail of a log. */
  private static Map<String, Object> connect(Arguments a) {
    String endpoint = a.text("endpoint");
    WaldClient.Builder builder = WaldClient.builder(endpoint).timeout(Duration.ofMillis(1900));
    if (endpoint.startsWith("https://")) {
      builder.tlsCa(file(a, "ca", "WALD_TLS_CA")).tlsCertificate(file(a, "cert", "WALD_TLS_CERT"), file(a, "key", "WALD_TLS_KEY"));
      if (!a.text("server_name").isEmpty()) {
        builder.serverName(a.text("server_name"));
      }
    }
    if (a.has("token")) {
      builder.token(a.text("token"));
    }
    try (WaldClient other = builder.build()) {
      other.tail("conformance/none");
    } catch (WaldException failed) {
      if (failed.reason() != Reason.LOG_NOT_FOUND) {
        throw failed;
      }
    }
    return object("connected", true);
  }

  /** The file of an argument, or else of the environment; null: none. */
  private static Path file(Arguments a, String name, String variable) {
    String path = a.has(name) ? a.text(name) : System.getenv(variable);
    return path == null || path.isEmpty() ? null : Path.of(path);
  }

  private static Map<String, Object> control(Arguments a) throws IOException, InterruptedException {
    Map<String, Object> given = new LinkedHashMap<>(a.members());
    given.keySet().removeAll(List.of("do", "action", "as"));
    HttpRequest request = HttpRequest.newBuilder(URI.create(System.getenv("WALD_CONTROL") + "/" + a.text("action")))
        .version(HttpClient.Version.HTTP_1_1)
        .POST(HttpRequest.BodyPublishers.ofString(Json.show(given)))
        .build();
    HttpResponse<String> answer = HTTP.send(request, HttpResponse.BodyHandlers.ofString());
    if (answer.statusCode() != 200) {
      throw new Wrong("the control endpoint answered " + answer.statusCode() + ": " + answer.body());
    }
    return object();
  }

  private static Durability durability(Arguments a) {
    return a.has("durability") ? Durability.valueOf(a.text("durability")) : Durability.UNSPECIFIED;
  }

  private static Batch batch(Arguments a) {
    Batch.Builder batch = Batch.builder().durability(durability(a));
    for (Arguments part : a.objects("batches")) {
      batch.append(part.text("log"), records(part.list("records")), condition(part.object("condition")));
    }
    for (Arguments part : a.objects("checks")) {
      Check check = Check.of(part.text("log"));
      check = part.has("expected_lsn") ? check.expectLsn(part.number("expected_lsn")) : check;
      check = part.flag("must_exist") ? check.mustExist() : check;
      check = part.flag("must_not_exist") ? check.mustNotExist() : check;
      batch.check(part.has("log_id") ? check.logId(part.number("log_id")) : check);
    }
    a.objects("cursors").forEach(cursor -> batch.move(commit(cursor)));
    return batch.build();
  }

  private static CursorCommit commit(Arguments a) {
    CursorCommit commit = CursorCommit.of(a.text("log"), a.text("cursor"), a.number("lsn"));
    commit = a.has("expected_lsn") ? commit.expectLsn(a.number("expected_lsn")) : commit;
    return a.has("log_id") ? commit.logId(a.number("log_id")) : commit;
  }

  private static Condition condition(Arguments a) {
    Condition condition = Condition.NONE;
    condition = a.has("expected_lsn") ? condition.expectLsn(a.number("expected_lsn")) : condition;
    condition = a.flag("must_exist") ? condition.mustExist() : condition;
    condition = a.flag("must_not_exist") ? condition.mustNotExist() : condition;
    condition = a.has("writer_epoch") ? condition.writerEpoch(a.number("writer_epoch")) : condition;
    condition = a.has("log_id") ? condition.logId(a.number("log_id")) : condition;
    if (a.has("producer")) {
      Arguments producer = a.object("producer");
      condition = condition.sequence(new Sequence(producer.text("id"), producer.number("epoch"), producer.number("sequence")));
    }
    return condition;
  }

  /** The records that the forms in a case stand for. */
  private static List<NewRecord> records(List<?> forms) {
    List<NewRecord> records = new ArrayList<>();
    for (Object form : forms) {
      if (form instanceof String text) {
        records.add(NewRecord.of(text));
        continue;
      }
      Arguments given = Arguments.of(form);
      if (!given.has("repeat")) {
        records.add(record(given));
        continue;
      }
      for (long i = 0; i < given.number("repeat"); i++) {
        String text = String.valueOf(i);
        records.add(NewRecord.of(text + ".".repeat((int) Math.max(0, given.number("bytes") - text.length()))));
      }
    }
    return records;
  }

  private static NewRecord record(Arguments a) {
    NewRecord record = NewRecord.of(a.text("data"));
    for (Object pair : a.list("headers")) {
      record = record.header(Header.of((String) ((List<?>) pair).get(0), (String) ((List<?>) pair).get(1)));
    }
    record = a.has("timestamp_us") ? record.time(time(a.number("timestamp_us"))) : record;
    return a.has("crc32c") ? record.checksum((int) a.number("crc32c")) : record;
  }
}
