package dev.wald.bench;

import dev.wald.AppendOptions;
import dev.wald.Durability;
import dev.wald.NewRecord;
import dev.wald.WaldClient;
import io.lettuce.core.RedisClient;
import io.lettuce.core.api.StatefulRedisConnection;
import java.util.Arrays;
import java.util.Locale;
import java.util.concurrent.TimeUnit;

/**
 * Appends of 128 bytes in a closed loop: each thread sends its next append when the last one is acknowledged.
 *
 * <pre>
 * Bench wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]
 * </pre>
 *
 * <p>{@code mvn -q -B install} in the folder of the client and {@code mvn -q -B package} here build it, and {@code java -cp
 * "target/classes:target/lib/*" dev.wald.bench.Bench} runs it.
 */
public final class Bench {
  private static final String PAYLOAD = "x".repeat(128);
  private static final long WARM_UP_NANOS = TimeUnit.SECONDS.toNanos(1);

  private Bench() {}

  public static void main(String[] arguments) throws Exception {
    boolean unary = arguments.length == 5 && arguments[4].equals("--unary");
    if (arguments.length != 4 && !unary) {
      System.err.println("usage: Bench wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]");
      System.exit(2);
    }
    String server = arguments[0];
    int inFlight = Integer.parseInt(arguments[2]);
    double seconds = Double.parseDouble(arguments[3]);
    if (server.equals("wald")) {
      try (WaldClient client = WaldClient.builder(arguments[1]).shareAppends(!unary).build()) {
        AppendOptions durable = AppendOptions.DEFAULT.durability(Durability.DURABLE);
        run(unary ? "wald-unary" : server, inFlight, seconds, () -> client.append("bench/java", NewRecord.of(PAYLOAD), durable));
      }
      return;
    }
    // Threads share one connection of Lettuce, the default of Spring Data Redis. It pipelines their commands.
    RedisClient client = RedisClient.create(arguments[1].contains("://") ? arguments[1] : "redis://" + arguments[1]);
    try (StatefulRedisConnection<String, String> connection = client.connect()) {
      run(server, inFlight, seconds, () -> connection.sync().xadd("log", "d", PAYLOAD));
    } finally {
      client.shutdown(0, 1, TimeUnit.SECONDS);
    }
  }

  /** The nanoseconds of the appends of one thread that ended in the measured time. */
  private static final class Times {
    private long[] nanos = new long[1 << 12];
    private int count;

    private void add(long time) {
      if (count == nanos.length) {
        nanos = Arrays.copyOf(nanos, 2 * count);
      }
      nanos[count++] = time;
    }
  }

  private static void run(String server, int inFlight, double seconds, Runnable append) throws InterruptedException {
    long begin = System.nanoTime() + WARM_UP_NANOS;
    long end = begin + (long) (seconds * 1e9);
    Times[] times = new Times[inFlight];
    Thread[] threads = new Thread[inFlight];
    for (int i = 0; i < inFlight; i++) {
      Times own = times[i] = new Times();
      threads[i] = new Thread(() -> {
        for (long sent = System.nanoTime(); sent < end;) {
          append.run();
          long acked = System.nanoTime();
          if (acked >= begin && acked < end) {
            own.add(acked - sent);
          }
          sent = acked;
        }
      });
      threads[i].start();
    }
    for (Thread thread : threads) {
      thread.join();
    }
    long[] all = Arrays.stream(times).flatMapToLong(own -> Arrays.stream(own.nanos, 0, own.count)).sorted().toArray();
    System.out.printf(Locale.ROOT,
        "{\"client\": \"java\", \"server\": \"%s\", \"in_flight\": %d, \"acks\": %d, \"seconds\": %s, \"p50_us\": %d, \"p99_us\": %d}%n",
        server, inFlight, all.length, seconds, percentile(all, 0.5), percentile(all, 0.99));
  }

  private static long percentile(long[] sorted, double part) {
    return sorted.length == 0 ? 0 : sorted[(int) Math.min(sorted.length - 1, part * sorted.length)] / 1000;
  }
}
