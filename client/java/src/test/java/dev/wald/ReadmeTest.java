package dev.wald;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;

class ReadmeTest {
  /** Takes the indentation away, so that a block can be quoted from inside a method. */
  private static String flat(String text) {
    return text.strip().lines().map(String::strip).collect(Collectors.joining("\n", "\n", "\n"));
  }

  @Test
  void readmeQuotesCodeThatIsCompiled() throws Exception {
    StringBuilder sources = new StringBuilder();
    for (String name : List.of("Tour", "Readme", "OrdersExample")) {
      sources.append(flat(Files.readString(Path.of("src/test/java/dev/wald/examples", name + ".java"))));
    }
    String[] blocks = Files.readString(Path.of("README.md")).split("```java\n");
    assertTrue(blocks.length > 8, "the README has " + (blocks.length - 1) + " blocks of Java");
    for (int i = 1; i < blocks.length; i++) {
      String code = blocks[i].substring(0, blocks[i].indexOf("\n```"));
      assertTrue(sources.indexOf(flat(code)) >= 0, "not in the examples:\n" + code);
    }
  }
}
