package dev.wald.conformance;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** The values of references in the steps of a case. */
final class Names {
  private static final Pattern REFERENCE = Pattern.compile("\\$\\{([^}]*)\\}");

  private final String prefix;
  private final Map<String, Object> kept;

  Names(String prefix, Map<String, Object> kept) {
    this.prefix = prefix;
    this.kept = new ConcurrentHashMap<>(kept);
  }

  void keep(String name, Object value) {
    kept.put(name, value);
  }

  /** A copy in which a name has another value. */
  Names with(String name, Object value) {
    Names copy = new Names(prefix, kept);
    if (value != null) {
      copy.keep(name, value);
    }
    return copy;
  }

  Object value(String name) {
    return kept.get(name);
  }

  /** Puts the values of references, sums and lists in their places. */
  Object resolve(Object value) {
    if (value instanceof String text) {
      return resolveText(text);
    }
    if (value instanceof List<?> list) {
      List<Object> resolved = new ArrayList<>();
      list.forEach(element -> resolved.add(resolve(element)));
      return resolved;
    }
    if (value instanceof Map<?, ?> members) {
      if (members.keySet().equals(Set.of("times", "each"))) {
        List<Object> list = new ArrayList<>();
        for (int i = 0; i < ((BigInteger) resolve(members.get("times"))).intValueExact(); i++) {
          list.add(with("i", BigInteger.valueOf(i)).resolve(members.get("each")));
        }
        return list;
      }
      Map<String, Object> resolved = new LinkedHashMap<>();
      members.forEach((name, member) -> resolved.put((String) name, resolve(member)));
      if (resolved.keySet().equals(Set.of("add"))) {
        return ((List<?>) resolved.get("add")).stream().map(BigInteger.class::cast).reduce(BigInteger.ZERO, BigInteger::add);
      }
      return resolved;
    }
    return value;
  }

  private Object resolveText(String text) {
    Matcher matcher = REFERENCE.matcher(text);
    if (matcher.matches()) {
      return lookUp(matcher.group(1));
    }
    return matcher.reset().replaceAll(found -> Matcher.quoteReplacement(String.valueOf(lookUp(found.group(1)))));
  }

  private Object lookUp(String path) {
    if (path.startsWith("log:")) {
      return prefix + path.substring("log:".length());
    }
    Object value = kept;
    for (String name : path.split("\\.")) {
      Object container = value;
      value = null;
      if (container instanceof Map<?, ?> members) {
        value = members.get(name);
      } else if (container instanceof List<?> list && name.matches("[0-9]+") && Integer.parseInt(name) < list.size()) {
        value = list.get(Integer.parseInt(name));
      }
      if (value == null) {
        throw new Wrong("${" + path + "}: there is no " + name);
      }
    }
    return value;
  }

  /** Compares the actual value with the expected one. Null: they are equal. */
  static String differ(String where, Object expected, Object actual) {
    if ("*".equals(expected) && actual != null) {
      return null;
    }
    if (expected instanceof List<?> list) {
      if (!(actual instanceof List<?> other) || other.size() != list.size()) {
        return where + ": expected " + shorten(expected) + ", got " + shorten(actual);
      }
      for (int i = 0; i < list.size(); i++) {
        String difference = differ(where + "." + i, list.get(i), other.get(i));
        if (difference != null) {
          return difference;
        }
      }
      return null;
    }
    if (expected instanceof Map<?, ?> members) {
      Boolean matches = match(members, actual);
      if (matches != null) {
        return matches ? null : where + ": expected " + Json.show(expected) + ", got " + shorten(actual);
      }
      if (!(actual instanceof Map<?, ?> other)) {
        return where + ": expected " + Json.show(expected) + ", got " + shorten(actual);
      }
      for (Map.Entry<?, ?> member : members.entrySet()) {
        String inner = where.isEmpty() ? (String) member.getKey() : where + "." + member.getKey();
        String difference = differ(inner, member.getValue(), other.get(member.getKey()));
        if (difference != null) {
          return difference;
        }
      }
      return null;
    }
    boolean equal = expected == null ? actual == null : expected.equals(actual);
    return equal ? null : where + ": expected " + Json.show(expected) + ", got " + shorten(actual);
  }

  /** Whether a comparison holds; null: this is no comparison. */
  private static Boolean match(Map<?, ?> members, Object actual) {
    if (members.size() != 1) {
      return null;
    }
    if (members.get("length") instanceof BigInteger length) {
      return actual instanceof List<?> list && length.equals(BigInteger.valueOf(list.size()));
    }
    if (members.get("at_least") instanceof BigInteger bound) {
      return actual instanceof BigInteger number && number.compareTo(bound) >= 0;
    }
    if (members.get("below") instanceof BigInteger bound) {
      return actual instanceof BigInteger number && number.compareTo(bound) < 0;
    }
    return null;
  }

  private static String shorten(Object value) {
    String shown = Json.show(value);
    return shown.length() <= 300 ? shown : shown.substring(0, 300) + "...";
  }
}
