package dev.wald;

import java.util.Optional;

/**
 * The place of the state of one producer or one follower: a file ({@link FileState}), or a row in the program's own database.
 *
 * <p>Calls come one after another. The bytes are a message of the contract ({@code dev.wald.v1.ProducerState}, {@code
 * dev.wald.v1.FollowerState}), as in clients of other languages. One producer or follower may use a state at a time: a state with a lock
 * takes it in {@link #load}.
 */
public interface State {
  /**
   * The state that was saved last; empty if none was. An array without bytes is a state that was cut off, which is refused.
   *
   * @throws Exception it cannot be read
   */
  Optional<byte[]> load() throws Exception;

  /**
   * Replaces the state: all of it or nothing. Once it has returned, the state survives a crash of the machine.
   *
   * @throws Exception it cannot be kept
   */
  void save(byte[] state) throws Exception;

  /**
   * Releases the lock. It is called once after each {@link #load} that returned, when the producer or follower is closed or could not be
   * opened. Its exception is ignored: all that counts has been saved by then. Default: there is no lock.
   *
   * @throws Exception the lock cannot be released
   */
  default void release() throws Exception {}
}
