package dev.wald.testing;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;

/**
 * A server for a test, with an empty store of its own: {@code wald --ephemeral}.
 *
 * <pre>{@code
 * try (EphemeralServer server = EphemeralServer.start();
 *     WaldClient client = WaldClient.connect(server.endpoint())) {
 *   client.append("orders", "tea");
 * }
 * }</pre>
 *
 * <p>It ends with {@link #close}, or with the process of the test, however that one ends.
 */
public final class EphemeralServer implements AutoCloseable {
  private final Process process;
  private final String endpoint;
  private final String http;

  private EphemeralServer(Process process, String endpoint, String http) {
    this.process = process;
    this.endpoint = endpoint;
    this.http = http;
  }

  /**
   * Starts a server and waits until it serves. The program is the one of the variable {@code WALD_BINARY}, or else the {@code wald} of PATH.
   * The server's errors go to the standard error of the test; the variable {@code WALD_LOG_FILTER} shows more.
   *
   * @param arguments further arguments of the program, such as {@code "--sync-mode", "async"}
   * @throws IllegalStateException if there is no such program, or it does not serve
   */
  public static EphemeralServer start(String... arguments) {
    String given = System.getenv("WALD_BINARY");
    String binary = given == null || given.isEmpty() ? "wald" : given;
    List<String> command = new ArrayList<>(List.of(binary, "--ephemeral"));
    command.addAll(Arrays.asList(arguments));
    ProcessBuilder builder = new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.INHERIT);
    Map<String, String> environment = builder.environment();
    if (environment.getOrDefault("WALD_LOG_FILTER", "").isEmpty()) {
      environment.put("WALD_LOG_FILTER", "error");
    }
    Process process;
    String line;
    try {
      process = builder.start();
      // Null if the server ends.
      line = new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8)).readLine();
    } catch (IOException failure) {
      throw new IllegalStateException("cannot start " + binary + ": " + failure.getMessage() + "; install wald, or set WALD_BINARY", failure);
    }
    String endpoint = address(line, "grpc=");
    String http = address(line, "http=");
    if (endpoint.isEmpty()) {
      process.destroy();
      throw new IllegalStateException(binary + " --ephemeral does not serve; its own error is above");
    }
    return new EphemeralServer(process, endpoint, http);
  }

  private static String address(String line, String name) {
    for (String word : line == null ? new String[0] : line.split(" ")) {
      if (word.startsWith(name)) {
        return word.substring(name.length());
      }
    }
    return "";
  }

  /** The address of the gRPC service: HOST:PORT. */
  public String endpoint() {
    return endpoint;
  }

  /** The address of metrics, probes and the console: HOST:PORT. */
  public String http() {
    return http;
  }

  /** Ends the server, which removes its store. */
  @Override
  public void close() {
    // SIGTERM, so that it removes its directory.
    process.destroy();
    try {
      process.waitFor();
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }
}
