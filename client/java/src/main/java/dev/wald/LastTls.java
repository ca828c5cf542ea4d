package dev.wald;

/** The last failure of TLS of a client; null once a server has answered. */
final class LastTls {
  private TlsProblem problem;
  private long at;

  synchronized void set(TlsProblem problem) {
    this.problem = problem;
    this.at = System.nanoTime();
  }

  synchronized void clear() {
    problem = null;
  }

  synchronized TlsProblem get() {
    return problem;
  }

  /** Whether the next handshake must wait, so that a client with a fault does not load the server. */
  synchronized boolean pauses() {
    return problem != null && System.nanoTime() - at < TlsProblem.PAUSE.toNanos();
  }
}
