package dev.wald;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.concurrent.TimeUnit;
import java.util.function.LongSupplier;

/** The token of a client: a fixed one, or that of a file, which may be replaced. Its text is in no error and in no description. */
final class TokenSource {
  /** Maximum size of a token file. */
  private static final int MAX_BYTES = 16 << 10;
  /** Minimum time between two reads of the file. */
  private static final long READ_PAUSE_NANOS = TimeUnit.SECONDS.toNanos(1);

  /** Null: the token is fixed. */
  private final Path path;
  private final LongSupplier clock;
  private String token;
  private long readAt;

  private TokenSource(Path path, String token, LongSupplier clock) {
    this.path = path;
    this.token = token;
    this.clock = clock;
    this.readAt = clock.getAsLong();
  }

  static TokenSource fixed(String token) {
    try {
      return new TokenSource(null, clean(token, "the token"), System::nanoTime);
    } catch (IOException fault) {
      throw Failure.badToken(fault.getMessage()).exception();
    }
  }

  static TokenSource file(Path path, LongSupplier clock) {
    try {
      return new TokenSource(path, readToken(path), clock);
    } catch (IOException fault) {
      throw Failure.badToken(fault.getMessage()).exception();
    }
  }

  boolean isFixed() {
    return path == null;
  }

  /** The token of the next call. A file with a fault is ignored: it may be replaced now. */
  synchronized String current() {
    if (path != null && clock.getAsLong() - readAt >= READ_PAUSE_NANOS) {
      read();
    }
    return token;
  }

  /** Whether there is another token than the refused one. */
  synchronized boolean changed(String refused) {
    if (path != null && token.equals(refused)) {
      read();
    }
    return !token.equals(refused);
  }

  private void read() {
    readAt = clock.getAsLong();
    try {
      token = readToken(path);
    } catch (IOException fault) {
      // The earlier token stays in force.
      return;
    }
  }

  private static String readToken(Path path) throws IOException {
    return clean(new String(SmallFiles.read(path, MAX_BYTES), StandardCharsets.UTF_8), path.toString());
  }

  /** Takes the white space around a token off. A header has only visible ASCII. */
  private static String clean(String text, String place) throws IOException {
    String token = text.strip();
    if (token.isEmpty()) {
      throw new IOException(place + " is empty, and must have a token");
    }
    if (token.chars().anyMatch(character -> character <= ' ' || character > '~')) {
      throw new IOException(place + " has characters that a token cannot have, such as white space inside");
    }
    return token;
  }
}
