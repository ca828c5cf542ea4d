package dev.wald.examples;

import dev.wald.Ack;
import dev.wald.Producer;
import dev.wald.Scan;
import dev.wald.ScanEvent;
import dev.wald.ScanOptions;
import dev.wald.WaldClient;

public class Tour {
  public static void main(String[] arguments) {
    // The server that WALD_ENDPOINT names; unset: 127.0.0.1:6925.
    try (WaldClient client = WaldClient.fromEnv()) {
      // Once this has answered, the record survives a power cut.
      Ack first = client.append("greetings", "hello");
      System.out.println("appended " + first.lsn() + ", " + first.durability());

      // A producer goes on through lost connections and restarts, and appends nothing twice.
      try (Producer producer = client.producer("greetings")) {
        for (int i = 0; i < 3; i++) {
          producer.send("greeting " + i);
        }
      } // waits for all acks

      // A follower gets existing records, then new ones. This one stops when it is caught up.
      try (Scan follower = client.follow("greetings", ScanOptions.DEFAULT.fromLsn(first.lsn()))) {
        for (ScanEvent event : follower) {
          event.batches().forEach(batch -> batch.records().forEach(record ->
              System.out.println(record.lsn() + ": " + record.text())));
          if (event.caughtUp()) {
            break;
          }
        }
      }
    }
  }
}
