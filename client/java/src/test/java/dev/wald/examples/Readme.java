package dev.wald.examples;

import com.google.protobuf.ByteString;
import dev.wald.Ack;
import dev.wald.AppendOptions;
import dev.wald.Batch;
import dev.wald.BatchAck;
import dev.wald.Condition;
import dev.wald.CursorCommit;
import dev.wald.Durability;
import dev.wald.DurableFollower;
import dev.wald.DurableProducer;
import dev.wald.FenceInfo;
import dev.wald.FileState;
import dev.wald.LogAck;
import dev.wald.NewRecord;
import dev.wald.Outcome;
import dev.wald.Page;
import dev.wald.Producer;
import dev.wald.ProducerOptions;
import dev.wald.ReadOptions;
import dev.wald.Reason;
import dev.wald.RetryPolicy;
import dev.wald.Scan;
import dev.wald.ScanEvent;
import dev.wald.ScanOptions;
import dev.wald.Session;
import dev.wald.StoredRecord;
import dev.wald.TailInfo;
import dev.wald.WaldClient;
import dev.wald.WaldException;
import dev.wald.v1.GetServerInfoRequest;
import dev.wald.v1.LogConfig;
import dev.wald.v1.OpsServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.MethodDescriptor;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/** The examples of the README, which run on the server of the environment. Each one prints its name once it is done. */
public final class Readme {
  private Readme() {}

  public static void main(String[] arguments) throws Exception {
    try (WaldClient client = WaldClient.fromEnv()) {
      Ack ack = records(client);
      System.out.println("ok records");
      conditions(client);
      System.out.println("ok conditions");
      batches(client, ack);
      System.out.println("ok batches");
      producers(client);
      System.out.println("ok producers");
      sessions(client);
      System.out.println("ok sessions");
      followers(client);
      System.out.println("ok followers");
      durable(client, Files.createTempDirectory("wald"));
      System.out.println("ok durable");
      administration(client);
      System.out.println("ok administration");
      tls();
      System.out.println("ok tls");
      settings();
      System.out.println("ok settings");
      errors(client);
      System.out.println("ok errors");
    }
  }

  static Ack records(WaldClient client) {
    client.append("orders", NewRecord.of(new byte[] {1, 2, 3}), AppendOptions.DEFAULT.durability(Durability.WRITTEN));
    Ack ack = client.append("orders", NewRecord.of("paid").header("order", "17").time(Instant.now()).checksum());

    Page page = client.read("orders", ReadOptions.DEFAULT.fromLsn(ack.lsn()));
    for (StoredRecord record : page.records()) {
      System.out.println(record.lsn() + " " + record.time() + " " + record.text());
    }
    return ack;
  }

  static void conditions(WaldClient client) {
    TailInfo tail = client.tail("orders");
    try {
      client.append("orders", NewRecord.of("only if nothing came between"), AppendOptions.DEFAULT.expectLsn(tail.tailLsn()));
    } catch (WaldException failure) {
      if (failure.reason() != Reason.POSITION_MISMATCH) {
        throw failure;
      }
      System.out.println("another program was faster: " + failure.facts().get("actual_lsn") + " " + failure.failedChecks());
    }
  }

  static void batches(WaldClient client, Ack ack) {
    BatchAck answer = client.appendBatch(Batch.builder()
        .append("orders", List.of(NewRecord.of("second"), NewRecord.of("third")), Condition.NONE.mustExist())
        .append("audit", NewRecord.of("two orders"))
        .move(CursorCommit.of("orders", "billing", ack.lsn() + 1))
        .build());
    answer.appends().forEach(part -> System.out.println(part.log() + " " + part.firstLsn()));
  }

  static void producers(WaldClient client) throws Exception {
    try (Producer producer = client.producer("payments")) {
      producer.append(NewRecord.of("one batch"), NewRecord.of("of two records"));

      List<CompletableFuture<LogAck>> answers = new ArrayList<>();
      for (int i = 0; i < 1_000; i++) {
        answers.add(producer.send("payment " + i));
      }
      LogAck last = answers.get(999).get();
      System.out.println("up to lsn " + last.firstLsn());
    }

    ProducerOptions named = ProducerOptions.DEFAULT.id("till-7", 0).firstSequence(0);
    try (Producer producer = client.producer("payments", named)) {
      producer.append("sent again after a restart of the program, it is not appended twice");
    }
  }

  static void sessions(WaldClient client) throws Exception {
    try (Session session = client.session(1 << 20)) {
      CompletableFuture<BatchAck> first = session.send(Batch.of("metrics", NewRecord.of("a")));
      CompletableFuture<BatchAck> second = session.send(Batch.of("metrics", NewRecord.of("b"), NewRecord.of("c")));
      System.out.println(first.get().appends().get(0).firstLsn() + " " + second.get().appends().get(0).nextLsn());
    } // waits for all acks; throws the failure that ended the session
  }

  static void followers(WaldClient client) {
    ByteString cursor = null;
    try (Scan follower = client.follow("payments")) { // or Logs.withPrefix("pay"), or Logs.all()
      for (ScanEvent event : follower) {
        event.gaps().forEach(System.out::println);
        event.batches().forEach(batch -> System.out.println(batch.records().size() + " records of " + batch.log()));
        cursor = event.cursor(); // goes on exactly here, also in another process
        if (event.caughtUp()) {
          break; // everything that was there has been delivered
        }
      }
    }
    try (Scan scan = client.scan("payments", ScanOptions.DEFAULT.after(cursor))) {
      Optional<ScanEvent> event = scan.next(Duration.ofSeconds(5)); // empty: nothing came in time, or the scan has ended
      event.ifPresent(found -> System.out.println("new since then: " + found.recordCount()));
    }
  }

  static void durable(WaldClient client, Path directory) {
    try (DurableProducer producer = client.durableProducer("transfers", FileState.of(directory.resolve("transfers.state")))) {
      for (long number = producer.nextSequence(); number < 100; number++) {
        producer.appendBatch("transfer " + number); // kept: it will be in the log once, even if the program is killed now
      }
    } // waits for all acks

    try (DurableFollower follower = client.durableFollower("transfers", FileState.of(directory.resolve("count.state")))) {
      long count = follower.effects().map(text -> Long.parseLong(text.toStringUtf8())).orElse(0L);
      while (count < 100) {
        count += follower.next().orElseThrow().recordCount();
        follower.keep(String.valueOf(count)); // effects and cursor together, or neither
      }
      System.out.println(count + " transfers in all");
    }
  }

  static void administration(WaldClient client) {
    // The position of a consumer, kept by the server.
    client.commitCursor(CursorCommit.of("orders", "shipping", 1));
    System.out.println(client.getCursor("orders", "shipping").lsn());

    // A writer takes over a log: older ones are shut out, so that their records end at the tail. It reads that, then writes.
    FenceInfo fence = client.fence("ledger");
    try (Scan scan = client.scan("ledger", ScanOptions.DEFAULT.untilLsn(fence.tailLsn()))) {
      scan.forEach(event -> System.out.println("of older writers: " + event.batches()));
    }
    client.append("ledger", NewRecord.of("mine"), AppendOptions.DEFAULT.writerEpoch(fence.writerEpoch()));

    client.trim("orders", 1); // forgets the records below
    client.sync(); // everything accepted before it is flushed to the device
    client.updateLog("orders", LogConfig.newBuilder().setMaxRecordBytes(100_000).build(), "max_record_bytes");
    client.listLogs("or").forEach(log -> System.out.println(log.name() + " " + log.tailLsn() + " " + log.storedBytes()));
    client.listProducers("payments").forEach(System.out::println); // forgetProducer makes room for another one

    // The generated stubs, for the rest.
    OpsServiceGrpc.OpsServiceBlockingStub ops = OpsServiceGrpc.newBlockingStub(client.channel());
    System.out.println(ops.getServerInfo(GetServerInfoRequest.getDefaultInstance()).getVersion());
  }

  static void tls() {
    try (WaldClient secured = WaldClient.builder("https://wald.internal")
        .tlsCa(Path.of("ca.pem")) // default: the CAs of this Java
        .tlsCertificate(Path.of("client.pem"), Path.of("client.key")) // if the server requires a certificate
        .tokenFile(Path.of("token")) // if the server requires a token
        .build()) {
      secured.sync();
    } catch (WaldException failure) {
      System.out.println(failure.tlsFailure() + " " + failure.getMessage()); // SETTINGS: there is no ca.pem here
    }
  }

  static void settings() {
    ClientInterceptor tracing = new ClientInterceptor() {
      @Override
      public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
        System.out.println("calls " + method.getBareMethodName());
        return next.newCall(method, options);
      }
    };
    try (WaldClient client = WaldClient.builderFromEnv()
        .timeout(Duration.ofSeconds(30)) // of a call, over all its attempts; default: 10 s
        .retry(RetryPolicy.DEFAULT)
        .intercept(tracing) // sees each attempt
        .build()) {
      client.tail("orders");
      client.withTimeout(Duration.ofSeconds(1)).tail("orders"); // the same connection
    }
  }

  static void errors(WaldClient client) {
    try {
      client.withTimeout(Duration.ofMillis(500)).append("orders", "last");
    } catch (WaldException failure) {
      if (failure.outcome() == Outcome.UNKNOWN) {
        System.out.println("look before you append again: " + failure.getMessage());
      }
    }
  }
}
