package dev.wald.conformance;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * JSON as cases have it: maps, lists, strings, booleans, null, and integers of 64 bits as {@link BigInteger}. A parser of our own spares the
 * package a dependency.
 */
final class Json {
  private final String text;
  private int at;

  private Json(String text) {
    this.text = text;
  }

  static Object parse(String text) {
    Json json = new Json(text);
    Object value = json.value();
    json.space();
    if (json.at != text.length()) {
      throw json.wrong();
    }
    return value;
  }

  private Object value() {
    space();
    char first = text.charAt(at);
    return switch (first) {
      case '{' -> object();
      case '[' -> array();
      case '"' -> string();
      case 't' -> word("true", true);
      case 'f' -> word("false", false);
      case 'n' -> word("null", null);
      default -> number();
    };
  }

  private Map<String, Object> object() {
    Map<String, Object> members = new LinkedHashMap<>();
    at++;
    space();
    while (text.charAt(at) != '}') {
      space();
      String name = string();
      space();
      expect(':');
      members.put(name, value());
      space();
      if (text.charAt(at) == ',') {
        at++;
      }
    }
    at++;
    return members;
  }

  private List<Object> array() {
    List<Object> list = new ArrayList<>();
    at++;
    space();
    while (text.charAt(at) != ']') {
      list.add(value());
      space();
      if (text.charAt(at) == ',') {
        at++;
      }
    }
    at++;
    return list;
  }

  private String string() {
    expect('"');
    StringBuilder content = new StringBuilder();
    for (char next = text.charAt(at++); next != '"'; next = text.charAt(at++)) {
      content.append(next == '\\' ? escape() : next);
    }
    return content.toString();
  }

  private char escape() {
    char kind = text.charAt(at++);
    if (kind == 'u') {
      at += 4;
      return (char) Integer.parseInt(text.substring(at - 4, at), 16);
    }
    int index = "bfnrt".indexOf(kind);
    return index < 0 ? kind : "\b\f\n\r\t".charAt(index);
  }

  private BigInteger number() {
    int begin = at;
    while (at < text.length() && "-0123456789".indexOf(text.charAt(at)) >= 0) {
      at++;
    }
    if (begin == at) {
      throw wrong();
    }
    return new BigInteger(text.substring(begin, at));
  }

  private Object word(String word, Object value) {
    if (!text.startsWith(word, at)) {
      throw wrong();
    }
    at += word.length();
    return value;
  }

  private void space() {
    while (at < text.length() && Character.isWhitespace(text.charAt(at))) {
      at++;
    }
  }

  private void expect(char wanted) {
    if (text.charAt(at) != wanted) {
      throw wrong();
    }
    at++;
  }

  private IllegalArgumentException wrong() {
    return new IllegalArgumentException("no JSON at character " + at);
  }

  /** A value as JSON. */
  static String show(Object value) {
    StringBuilder shown = new StringBuilder();
    show(value, shown);
    return shown.toString();
  }

  private static void show(Object value, StringBuilder shown) {
    if (value instanceof Map<?, ?> members) {
      String separator = "{";
      for (Map.Entry<?, ?> member : members.entrySet()) {
        shown.append(separator);
        show(member.getKey(), shown);
        shown.append(':');
        show(member.getValue(), shown);
        separator = ",";
      }
      shown.append(members.isEmpty() ? "{}" : "}");
    } else if (value instanceof List<?> list) {
      String separator = "[";
      for (Object element : list) {
        shown.append(separator);
        show(element, shown);
        separator = ",";
      }
      shown.append(list.isEmpty() ? "[]" : "]");
    } else if (value instanceof String string) {
      shown.append('"');
      for (char character : string.toCharArray()) {
        switch (character) {
          case '"', '\\' -> shown.append('\\').append(character);
          default -> shown.append(character < ' ' ? String.format("\\u%04x", (int) character) : character);
        }
      }
      shown.append('"');
    } else {
      shown.append(value);
    }
  }
}
