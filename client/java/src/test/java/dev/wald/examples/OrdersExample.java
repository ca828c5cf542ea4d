package dev.wald.examples;

import static org.junit.jupiter.api.Assertions.assertEquals;

import dev.wald.WaldClient;
import dev.wald.testing.EphemeralServer;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

class OrdersExample {
  static EphemeralServer server;

  @BeforeAll
  static void start() {
    server = EphemeralServer.start();
  }

  @AfterAll
  static void stop() {
    if (server != null) {
      server.close();
    }
  }

  @Test
  void ordersAreKept() {
    try (WaldClient client = WaldClient.connect(server.endpoint())) {
      client.append("orders", "tea");

      assertEquals("tea", client.read("orders").records().get(0).text());
    }
  }
}
