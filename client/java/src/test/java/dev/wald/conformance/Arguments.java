package dev.wald.conformance;

import com.google.protobuf.ByteString;
import java.math.BigInteger;
import java.util.List;
import java.util.Map;
import java.util.function.LongConsumer;

/** The members of a step, or of an object within. */
record Arguments(Map<String, Object> members) {
  boolean has(String name) {
    return members.containsKey(name);
  }

  /** Empty if it is not given. */
  String text(String name) {
    return has(name) ? as(String.class, name) : "";
  }

  boolean flag(String name) {
    return has(name) && as(Boolean.class, name);
  }

  /** 0 if it is not given. The bits of an unsigned number. */
  long number(String name) {
    return has(name) ? as(BigInteger.class, name).longValue() : 0;
  }

  /** Calls back with the number if it is given. */
  void ifNumber(String name, LongConsumer action) {
    if (has(name)) {
      action.accept(number(name));
    }
  }

  ByteString bytes(String name) {
    return as(ByteString.class, name);
  }

  List<?> list(String name) {
    return has(name) ? as(List.class, name) : List.of();
  }

  List<Arguments> objects(String name) {
    return list(name).stream().map(Arguments::of).toList();
  }

  Arguments object(String name) {
    return has(name) ? of(members.get(name)) : new Arguments(Map.of());
  }

  @SuppressWarnings("unchecked")
  static Arguments of(Object members) {
    if (!(members instanceof Map)) {
      throw new Wrong("no object: " + Json.show(members));
    }
    return new Arguments((Map<String, Object>) members);
  }

  private <T> T as(Class<T> type, String name) {
    Object value = members.get(name);
    if (!type.isInstance(value)) {
      throw new Wrong("argument " + name + ": not " + Json.show(value));
    }
    return type.cast(value);
  }
}
