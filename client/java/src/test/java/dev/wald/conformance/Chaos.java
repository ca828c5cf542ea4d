package dev.wald.conformance;

import dev.wald.Gap;
import dev.wald.LogAck;
import dev.wald.Logs;
import dev.wald.Producer;
import dev.wald.ProducerOptions;
import dev.wald.RecordBatch;
import dev.wald.Scan;
import dev.wald.ScanEvent;
import dev.wald.ScanOptions;
import dev.wald.StoredRecord;
import dev.wald.WaldClient;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** The modes of the chaos run. */
final class Chaos {
  /** Number of batches that a producer has in flight. */
  private static final int IN_FLIGHT = 32;

  private Chaos() {}

  /** Appends numbered records until the file WALD_STOP is there. */
  static void produce(String log, String id, double rate) throws Exception {
    Path stop = Path.of(System.getenv("WALD_STOP"));
    long periodNanos = (long) (TimeUnit.SECONDS.toNanos(1) / rate);
    ProducerOptions options = ProducerOptions.DEFAULT.id(id, 1).inFlight(IN_FLIGHT, Producer.DEFAULT_BYTES_IN_FLIGHT);
    try (WaldClient client = WaldClient.fromEnv(); Producer producer = client.producer(log, options)) {
      Deque<CompletableFuture<LogAck>> answers = new ArrayDeque<>();
      long total = 0;
      long due = System.nanoTime();
      while (!Files.exists(stop)) {
        due += periodNanos;
        TimeUnit.NANOSECONDS.sleep(due - System.nanoTime());
        while (answers.size() == IN_FLIGHT || !answers.isEmpty() && answers.peek().isDone()) {
          answers.poll().get();
        }
        answers.add(producer.send(id + ":" + total));
        total++;
      }
      for (CompletableFuture<LogAck> answer : answers) {
        answer.get();
      }
      producer.append("END:" + id);
      System.out.println(id + " " + total);
    }
  }

  /** Prints the records it sees, until it has seen this number of ends. */
  static void follow(String prefix, int count) {
    int remaining = count;
    try (WaldClient client = WaldClient.fromEnv(); Scan follower = client.follow(Logs.withPrefix(prefix), ScanOptions.DEFAULT)) {
      while (remaining > 0) {
        ScanEvent event = follower.next().orElseThrow();
        for (Gap gap : event.gaps()) {
          String to = gap.toLsn().isPresent() ? String.valueOf(gap.toLsn().getAsLong()) : "-";
          System.out.println("GAP " + gap.log() + " " + gap.fromLsn() + " " + to + " " + gap.reason());
        }
        for (RecordBatch batch : event.batches()) {
          for (StoredRecord record : batch.records()) {
            System.out.println(batch.log() + " " + record.lsn() + " " + record.text());
            remaining -= record.text().startsWith("END:") ? 1 : 0;
          }
        }
      }
    }
  }
}
