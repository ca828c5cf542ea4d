package dev.wald;

import java.util.List;
import java.util.Objects;
import java.util.function.Function;
import java.util.stream.Stream;

/** Lists that come in pages. */
final class Pages {
  private Pages() {}

  /**
   * One page of a list.
   *
   * @param elements the elements
   * @param next the token of the next page; empty: this was the last
   */
  record Page<T>(List<T> elements, String next) {}

  /** The elements of all pages. A page is requested when the stream gets there. */
  static <T> Stream<T> stream(Function<String, Page<T>> page) {
    return Stream.of(page)
        .flatMap(ask -> Stream.iterate(ask.apply(""), Objects::nonNull, found -> found.next().isEmpty() ? null : ask.apply(found.next())))
        .flatMap(found -> found.elements().stream());
  }
}
