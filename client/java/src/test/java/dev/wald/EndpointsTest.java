package dev.wald;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class EndpointsTest {
  @ParameterizedTest
  @CsvSource({"localhost,localhost:6925", "http://localhost/,localhost:6925", "[::1],[::1]:6925", "::1,[::1]:6925",
      "http://localhost:80,localhost:80", "dns:///wald,dns:///wald", "https://wald.internal,wald.internal:6925", "[::1]:80,[::1]:80"})
  void endpointsGetTheDefaultPort(String endpoint, String target) {
    assertEquals(List.of(target), Endpoints.parse(endpoint));
  }

  @ParameterizedTest
  @ValueSource(strings = {"", "http://", "https://", "127.0.0.1:179250", "localhost:0", "localhost:x", "localhost:", "me:secret@localhost",
      "a/b", "[::1", "[::1]x", ":6925"})
  void endpointsWithAFaultAreRefused(String endpoint) {
    WaldException failure = assertThrows(WaldException.class, () -> Endpoints.parse(endpoint));
    assertEquals(FailureKind.USAGE, failure.kind());
    assertFalse(failure.getMessage().contains("secret"));
  }

  @Test
  void listsOfEndpointsAreUnderstood() {
    assertEquals(List.of("a:6925", "b:1"), Endpoints.parse("a,b:1"));
    assertEquals(List.of("a:6925", "b:6925"), Endpoints.parse("https://a,https://b"));
    assertEquals(List.of("dns:///a,b"), Endpoints.parse("dns:///a,b"));
  }

  @ParameterizedTest
  @CsvSource(delimiter = '|', value = {"a,|part 2", "a,,b|part 2", ",a|part 1", "a, b|white space", "a,dns:///b|gRPC's own",
      "https://a,b|same scheme", "a,https://b|same scheme", "a,b:x|b:x"})
  void listsThatCannotBeUsedAreRefusedWithTheirPart(String endpoint, String words) {
    WaldException failure = assertThrows(WaldException.class, () -> Endpoints.parse(endpoint));
    assertTrue(failure.getMessage().contains(words), failure.getMessage());
  }

  @Test
  void environmentHasTheSettings() {
    try (WaldClient client = WaldClient.builderFromEnv(Map.of("WALD_ENDPOINT", "", "WALD_TOKEN", "")).build()) {
      assertEquals(WaldClient.DEFAULT_ENDPOINT, client.server());
    }
    try (WaldClient client = WaldClient.builderFromEnv(Map.of("WALD_ENDPOINT", "a,b:7")).build()) {
      assertEquals("a:6925", client.server());
    }
    WaldException failure = assertThrows(WaldException.class,
        () -> WaldClient.builderFromEnv(Map.of("WALD_ENDPOINT", "https://a", "WALD_TLS_CA", "/missing")).build());
    assertEquals(TlsFailure.SETTINGS, failure.tlsFailure().orElseThrow());
    assertTrue(failure.getMessage().contains("/missing: no such file"), failure.getMessage());
    failure = assertThrows(WaldException.class,
        () -> WaldClient.builderFromEnv(Map.of("WALD_TOKEN_FILE", "/missing", "WALD_TOKEN", "x")).build());
    assertEquals(FailureKind.TOKEN, failure.kind());
  }

  @Test
  void settingsOfTlsNeedAnEndpointForTls() {
    WaldException failure = assertThrows(WaldException.class, () -> WaldClient.builder("a").serverName("b").build());
    assertEquals(FailureKind.USAGE, failure.kind());
  }
}
