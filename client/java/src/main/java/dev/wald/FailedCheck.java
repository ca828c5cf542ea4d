package dev.wald;

import java.io.Serializable;

/**
 * One condition that did not hold.
 *
 * @param reason the reason; {@link Reason#OTHER} if this package does not name it
 * @param reasonText the reason as the server spells it, such as {@code POSITION_MISMATCH}
 * @param log the log that was checked
 * @param description the expected and the actual value, for people
 */
public record FailedCheck(Reason reason, String reasonText, String log, String description) implements Serializable {}
