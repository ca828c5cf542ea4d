package dev.wald.conformance;

/** The reason why a case has failed. */
final class Wrong extends RuntimeException {
  private static final long serialVersionUID = 1L;

  Wrong(String message) {
    super(message);
  }

  Wrong(String message, Throwable cause) {
    super(message, cause);
  }
}
