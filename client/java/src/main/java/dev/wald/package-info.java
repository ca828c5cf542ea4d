/**
 * The client of Wald, which keeps write-ahead logs for other programs.
 *
 * <p>A {@link dev.wald.WaldClient} appends, reads and administers. A {@link dev.wald.Session} pipelines appends. A {@link
 * dev.wald.Producer} appends exactly once, whatever breaks. A {@link dev.wald.Scan} reads, or follows as records arrive, whatever breaks.
 *
 * <p>Every failure is a {@link dev.wald.WaldException}. It says whether a write was applied and whether the same request may be sent again.
 *
 * <p>Numbers of 64 bits (lsns, epochs, log ids) are {@code long}, and unsigned. No parameter and no result is null.
 */
package dev.wald;
