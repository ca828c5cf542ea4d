package dev.wald;

/** Safety of records. The levels are ordered, and each includes those before it. */
public enum Durability {
  /** In a request: the level of the log's sync mode. In an answer: a level that this package does not name. */
  UNSPECIFIED,
  /** In the daemon's memory: lost when the process is killed. */
  ACCEPTED,
  /** Handed to the operating system: survives a kill -9, not a power cut. */
  WRITTEN,
  /** Flushed to the device: survives a power cut. */
  DURABLE,
  /** Also in the bucket of a replica: survives the loss of the machine. */
  REPLICATED;

  dev.wald.v1.Durability proto() {
    return dev.wald.v1.Durability.forNumber(ordinal());
  }

  static Durability of(dev.wald.v1.Durability level) {
    return switch (level) {
      case DURABILITY_ACCEPTED -> ACCEPTED;
      case DURABILITY_WRITTEN -> WRITTEN;
      case DURABILITY_DURABLE -> DURABLE;
      case DURABILITY_REPLICATED -> REPLICATED;
      default -> UNSPECIFIED;
    };
  }
}
