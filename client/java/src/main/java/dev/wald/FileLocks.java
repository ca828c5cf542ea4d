package dev.wald;

import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.channels.OverlappingFileLockException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;

/**
 * The locks on files of this process.
 *
 * <p>Linux and macOS have the locks of POSIX: a process loses its lock on a file when it closes any descriptor of the file. A file that is
 * locked here is therefore never opened a second time.
 */
final class FileLocks {
  /** The files that are locked. */
  private static final Set<Object> HELD = new HashSet<>();
  /** Channels that must stay open for ever: see {@link #take}. */
  private static final List<FileChannel> OPEN = new ArrayList<>();

  private FileLocks() {}

  /** A lock that is held. */
  static final class Held {
    private final Object file;
    private final FileChannel channel;

    private Held(Object file, FileChannel channel) {
      this.file = file;
      this.channel = channel;
    }

    /** Gives the lock back. A second call could release the lock of another one. */
    void release() throws IOException {
      synchronized (HELD) {
        try {
          channel.close();
        } finally {
          HELD.remove(file);
        }
      }
    }
  }

  /** Makes or finds a file and locks it. It does not wait: null if it is locked. */
  static Held take(Path path) throws IOException {
    synchronized (HELD) {
      FileState.create(path);
      Object file = identity(path);
      if (HELD.contains(file)) {
        return null;
      }
      FileChannel channel = FileChannel.open(path, StandardOpenOption.WRITE);
      try {
        if (channel.tryLock() != null) {
          HELD.add(file);
          return new Held(file, channel);
        }
      } catch (OverlappingFileLockException loadedTwice) {
        // This package has been loaded a second time, and its other copy has the lock. To close the channel would release it.
        OPEN.add(channel);
        return null;
      } catch (IOException failure) {
        channel.close();
        throw failure;
      }
      channel.close();
      return null;
    }
  }

  /** The file that a path leads to, whatever the path. */
  private static Object identity(Path path) throws IOException {
    Object key = Files.readAttributes(path, BasicFileAttributes.class).fileKey();
    return key == null ? path.toRealPath() : key;
  }
}
