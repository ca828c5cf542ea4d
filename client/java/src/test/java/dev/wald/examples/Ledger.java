package dev.wald.examples;

import dev.wald.DurableFollower;
import dev.wald.DurableProducer;
import dev.wald.FileState;
import dev.wald.Logs;
import dev.wald.ScanEvent;
import dev.wald.ScanOptions;
import dev.wald.WaldClient;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.TreeMap;
import java.util.regex.MatchResult;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/**
 * Usage: Ledger DIR PREFIX COUNT.
 *
 * <p>A ledger that may be killed at any moment, and started again: two producers append COUNT transfers exactly once, and a follower keeps
 * the balances. Each keeps its state in one file of DIR, always together with its effects. Prints the balances when all transfers are
 * applied.
 */
public final class Ledger {
  /** A member of JSON that is a text or a number. The JSON of this program has no others but {@code balances}. */
  private static final Pattern MEMBER = Pattern.compile("\"(\\w+)\"\\s*:\\s*\"?(-?\\w+)");

  private long applied;
  private final Map<String, Long> balances = new TreeMap<>();

  private Ledger(String json) {
    Map<String, String> found = members(json);
    found.forEach((name, number) -> balances.put(name, Long.parseLong(number)));
    Long number = balances.remove("applied");
    applied = number == null ? 0 : number;
  }

  private static Map<String, String> members(String json) {
    Map<String, String> found = new HashMap<>();
    for (MatchResult member : MEMBER.matcher(json).results().toList()) {
      found.put(member.group(1), member.group(2));
    }
    return found;
  }

  /** The transfers are the same in every run: a repeated transfer has the same content. */
  private static String transfer(long number) {
    return "{\"from\":\"account" + number * 7 % 10 + "\",\"to\":\"account" + (number * 3 + 1) % 10 + "\",\"amount\":"
        + (number * 13 % 100 + 1) + "}";
  }

  private void apply(String transfer) {
    Map<String, String> found = members(transfer);
    long amount = Long.parseLong(found.get("amount"));
    balances.merge(found.get("from"), -amount, Long::sum);
    balances.merge(found.get("to"), amount, Long::sum);
    applied++;
  }

  private String json() {
    return balances.entrySet().stream()
        .map(account -> "\"" + account.getKey() + "\":" + account.getValue())
        .collect(Collectors.joining(",", "{\"applied\":" + applied + ",\"balances\":{", "}}"));
  }

  private static void produce(WaldClient client, Path directory, String prefix, int half, long count) {
    FileState state = FileState.of(directory.resolve("producer" + half + ".state"));
    try (DurableProducer producer = client.durableProducer(prefix + half, state)) {
      for (long number = producer.nextSequence(); number < count / 2; number++) {
        producer.appendBatch(transfer(2 * number + half));
      }
    } // waits for all acks
  }

  private static Ledger follow(WaldClient client, Path directory, String prefix, long count) {
    FileState state = FileState.of(directory.resolve("ledger.state"));
    try (DurableFollower follower = client.durableFollower(Logs.withPrefix(prefix), state, ScanOptions.DEFAULT)) {
      Ledger ledger = new Ledger(follower.effects().map(effects -> effects.toStringUtf8()).orElse("{}"));
      while (ledger.applied < count) {
        ScanEvent event = follower.next().orElseThrow();
        event.batches().forEach(batch -> batch.records().forEach(record -> ledger.apply(record.text())));
        // Together with the cursor behind these records.
        follower.keep(ledger.json());
      }
      return ledger;
    }
  }

  public static void main(String[] arguments) throws InterruptedException {
    Path directory = Path.of(arguments[0]);
    String prefix = arguments[1];
    long count = Long.parseLong(arguments[2]);
    // A failure of one thread ends the program, whose next start continues.
    Thread.setDefaultUncaughtExceptionHandler((thread, failure) -> {
      failure.printStackTrace();
      System.exit(1);
    });
    try (WaldClient client = WaldClient.fromEnv()) {
      Thread[] producers = new Thread[2];
      for (int i = 0; i < producers.length; i++) {
        int half = i;
        producers[i] = new Thread(() -> produce(client, directory, prefix, half, count));
        producers[i].start();
      }
      Ledger ledger = follow(client, directory, prefix, count);
      for (Thread producer : producers) {
        producer.join();
      }
      System.out.println(ledger.json());
    }
  }
}
