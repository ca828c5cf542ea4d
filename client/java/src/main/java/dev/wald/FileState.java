package dev.wald;

import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.channels.ClosedByInterruptException;
import java.nio.channels.FileChannel;
import java.nio.file.AccessDeniedException;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.FileAttribute;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.Optional;

/**
 * State in a file, which only its owner can read.
 *
 * <p>Each save writes a new file, {@code PATH.new}, flushes it, and renames it. A producer or follower that uses the state holds a lock on
 * a third file, {@code PATH.lock}, until it is closed or its process ends. Another one is refused, in this process and in others. The file
 * stays. On Linux clients for Go and Python see this lock, and this class sees theirs. The client for Rust has a lock of another kind: let
 * programs in Rust and Java not use a state at the same time. If the path is a symbolic link, all of this concerns the file that the link
 * names, and the link stays.
 */
public final class FileState implements State {
  private Path path;
  /** Null: it is not held. */
  private FileLocks.Held lock;

  private FileState(Path path) {
    this.path = path;
  }

  /** State in the file of this path. Its directory must exist. */
  public static FileState of(Path path) {
    return new FileState(path.toAbsolutePath());
  }

  /** State in the file of this path. Its directory must exist. */
  public static FileState of(String path) {
    return of(Path.of(path));
  }

  @Override
  public synchronized Optional<byte[]> load() throws IOException {
    if (lock != null) {
      throw inUse();
    }
    // Otherwise a save would replace the link, and users of different names would have different locks.
    path = behindLinks(path);
    FileLocks.Held taken;
    try {
      taken = FileLocks.take(beside(".lock"));
    } catch (IOException failure) {
      throw described(failure);
    }
    if (taken == null) {
      throw inUse();
    }
    try {
      Optional<byte[]> state = read();
      lock = taken;
      return state;
    } finally {
      if (lock == null) {
        taken.release();
      }
    }
  }

  /** The path that a symbolic link names, which need not exist; the path itself, if it is no link. */
  private static Path behindLinks(Path path) {
    // The kernel refuses a path with more links.
    for (int links = 0; links < 40; links++) {
      try {
        path = path.resolveSibling(Files.readSymbolicLink(path));
      } catch (IOException | UnsupportedOperationException none) {
        break;
      }
    }
    return path;
  }

  private Optional<byte[]> read() throws IOException {
    try {
      return Optional.of(Files.readAllBytes(path));
    } catch (NoSuchFileException none) {
      return Optional.empty();
    } catch (IOException failure) {
      throw described(failure);
    }
  }

  @Override
  public synchronized void save(byte[] state) throws IOException {
    Path added = beside(".new");
    try {
      create(added);
      // An interrupt does not end this stream, as it ends a channel.
      try (FileOutputStream file = new FileOutputStream(added.toFile())) {
        file.write(state);
        file.getFD().sync();
      }
      Files.move(added, path, StandardCopyOption.ATOMIC_MOVE);
      // Without this a crash of the machine may bring the earlier file back.
      flushDirectory(path.getParent());
    } catch (IOException failure) {
      throw described(failure);
    }
  }

  /** Releases the lock. */
  @Override
  public synchronized void release() throws IOException {
    if (lock != null) {
      FileLocks.Held held = lock;
      lock = null;
      held.release();
    }
  }

  @Override
  public String toString() {
    return "FileState[" + path + "]";
  }

  private Path beside(String suffix) {
    return path.resolveSibling(path.getFileName() + suffix);
  }

  private IOException inUse() {
    return new IOException(path + ": another process or producer uses it");
  }

  /** The exception with the path and the reason: some of the system's exceptions have only a path. */
  private IOException described(IOException failure) {
    String reason = failure.getMessage();
    if (failure instanceof NoSuchFileException) {
      reason = "no such file or directory";
    } else if (failure instanceof AccessDeniedException) {
      reason = "permission denied";
    } else if (failure instanceof FileSystemException system && system.getReason() != null) {
      reason = system.getReason();
    }
    return new IOException(path + ": " + reason, failure);
  }

  /** Makes a file that only its owner can read, if there is none. */
  static void create(Path path) throws IOException {
    boolean posix = path.getFileSystem().supportedFileAttributeViews().contains("posix");
    FileAttribute<?>[] attributes = posix
        ? new FileAttribute<?>[] {PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rw-------"))}
        : new FileAttribute<?>[0];
    try {
      Files.createFile(path, attributes);
    } catch (FileAlreadyExistsException earlier) {
      // A save that did not end has left it, or it is the file of a lock.
      return;
    }
  }

  private static void flushDirectory(Path directory) throws IOException {
    // Windows cannot flush a directory.
    if (System.getProperty("os.name").startsWith("Windows")) {
      return;
    }
    boolean interrupted = Thread.interrupted();
    try {
      for (;;) {
        try (FileChannel channel = FileChannel.open(directory, StandardOpenOption.READ)) {
          channel.force(true);
          return;
        } catch (ClosedByInterruptException again) {
          // The state has its name already, so it must be flushed.
          interrupted |= Thread.interrupted();
        }
      }
    } finally {
      if (interrupted) {
        Thread.currentThread().interrupt();
      }
    }
  }
}
