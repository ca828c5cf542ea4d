package dev.wald;

import java.time.Duration;

/**
 * How a call may be repeated, and the meaning of its failure.
 *
 * @param repeat the effect of a repeat
 * @param reads the call writes nothing, and ends with the client
 * @param extra comes on top of the timeout
 * @param patient the call repeats until its deadline, whatever the policy
 */
record CallKind(Repeat repeat, boolean reads, Duration extra, boolean patient) {
  static final CallKind READING = new CallKind(Repeat.HARMLESS, true, Duration.ZERO, false);

  static CallKind writing(Repeat repeat) {
    return new CallKind(repeat, false, Duration.ZERO, false);
  }
}
