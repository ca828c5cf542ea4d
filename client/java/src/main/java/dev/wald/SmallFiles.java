package dev.wald;

import java.io.IOException;
import java.io.InputStream;
import java.nio.file.AccessDeniedException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;

/** Files of settings, which are small. */
final class SmallFiles {
  private SmallFiles() {}

  /** Reads a file of at most this size. The exception has a sentence for people. */
  static byte[] read(Path path, int limit) throws IOException {
    byte[] content;
    try (InputStream file = Files.newInputStream(path)) {
      content = file.readNBytes(limit + 1);
    } catch (NoSuchFileException missing) {
      throw new IOException("cannot read " + path + ": no such file or directory", missing);
    } catch (AccessDeniedException denied) {
      throw new IOException("cannot read " + path + ": permission denied", denied);
    } catch (IOException failure) {
      throw new IOException("cannot read " + path + ": " + failure.getMessage(), failure);
    }
    if (content.length > limit) {
      throw new IOException(path + " is larger than " + (limit >> 10) + " KiB");
    }
    return content;
  }
}
