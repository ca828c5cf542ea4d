package dev.wald;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.PrivateKey;
import java.security.PublicKey;
import java.security.Signature;
import java.security.cert.CertificateException;
import java.security.cert.CertificateFactory;
import java.security.cert.X509Certificate;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Certificates and keys in PEM. The JDK reads only keys in PKCS #8; older tools also write PKCS #1 and SEC 1. */
final class Pem {
  private static final Pattern BLOCK = Pattern.compile("-----BEGIN ([A-Z0-9 ]+)-----([^-]*)-----END \\1-----");
  private static final byte[] RSA = {0x30, 0x0d, 0x06, 0x09, 0x2a, (byte) 0x86, 0x48, (byte) 0x86, (byte) 0xf7, 0x0d, 0x01, 0x01, 0x01, 5, 0};
  private static final byte[] EC = {0x06, 0x07, 0x2a, (byte) 0x86, 0x48, (byte) 0xce, 0x3d, 0x02, 0x01};
  private static final byte[] VERSION_0 = {2, 1, 0};
  private static final int SEQUENCE = 0x30;
  private static final int OCTETS = 4;
  /** The tag of the curve in a key of SEC 1. */
  private static final int CURVE = 0xa0;

  private Pem() {}

  private record Block(String type, byte[] content) {}

  private static List<Block> blocks(byte[] pem) {
    List<Block> blocks = new ArrayList<>();
    Matcher matcher = BLOCK.matcher(new String(pem, StandardCharsets.ISO_8859_1));
    while (matcher.find()) {
      try {
        blocks.add(new Block(matcher.group(1), Base64.getMimeDecoder().decode(matcher.group(2))));
      } catch (IllegalArgumentException damaged) {
        blocks.add(new Block(matcher.group(1), new byte[0]));
      }
    }
    return blocks;
  }

  /** All certificates of a file. The list may be empty. */
  static List<X509Certificate> certificates(byte[] pem) throws CertificateException {
    CertificateFactory factory = CertificateFactory.getInstance("X.509");
    List<X509Certificate> certificates = new ArrayList<>();
    for (Block block : blocks(pem)) {
      if (block.type.equals("CERTIFICATE")) {
        certificates.add((X509Certificate) factory.generateCertificate(new ByteArrayInputStream(block.content)));
      }
    }
    return certificates;
  }

  /** The first private key of a file, for a certificate with this public key. Null: there is none that can be read. */
  static PrivateKey key(byte[] pem, PublicKey publicKey) {
    for (Block block : blocks(pem)) {
      try {
        byte[] encoded = switch (block.type) {
          case "PRIVATE KEY" -> block.content;
          case "RSA PRIVATE KEY" -> der(SEQUENCE, VERSION_0, RSA, der(OCTETS, block.content));
          case "EC PRIVATE KEY" -> der(SEQUENCE, VERSION_0, der(SEQUENCE, EC, curve(block.content)), der(OCTETS, block.content));
          default -> null;
        };
        if (encoded != null) {
          return read(encoded, publicKey);
        }
      } catch (GeneralSecurityException | RuntimeException damaged) {
        return null;
      }
    }
    return null;
  }

  /** The key, whose kind is usually that of the certificate. */
  private static PrivateKey read(byte[] encoded, PublicKey publicKey) throws GeneralSecurityException {
    GeneralSecurityException last = null;
    for (String algorithm : List.of(publicKey.getAlgorithm(), "EC", "RSA", "EdDSA")) {
      try {
        return KeyFactory.getInstance(algorithm).generatePrivate(new PKCS8EncodedKeySpec(encoded));
      } catch (GeneralSecurityException other) {
        last = other;
      }
    }
    throw last;
  }

  /** Whether the keys are a pair: one verifies a signature of the other. */
  static boolean isPair(PrivateKey key, PublicKey publicKey) {
    String algorithm = switch (publicKey.getAlgorithm()) {
      case "RSA" -> "SHA256withRSA";
      case "EC" -> "SHA256withECDSA";
      default -> publicKey.getAlgorithm();
    };
    try {
      Signature signature = Signature.getInstance(algorithm);
      signature.initSign(key);
      signature.update(VERSION_0);
      byte[] signed = signature.sign();
      signature.initVerify(publicKey);
      signature.update(VERSION_0);
      return signature.verify(signed);
    } catch (GeneralSecurityException noPair) {
      return false;
    }
  }

  /** An element of DER. */
  private static byte[] der(int tag, byte[]... parts) {
    int length = Arrays.stream(parts).mapToInt(part -> part.length).sum();
    ByteArrayOutputStream element = new ByteArrayOutputStream();
    element.write(tag);
    // The shortest form is the only one in DER.
    if (length >= 256) {
      element.write(0x82);
      element.write(length >> 8);
    } else if (length >= 128) {
      element.write(0x81);
    }
    element.write(length);
    for (byte[] part : parts) {
      element.writeBytes(part);
    }
    return element.toByteArray();
  }

  /** The name of the curve in a key of SEC 1, as an element of DER. */
  private static byte[] curve(byte[] key) {
    int at = content(key, 0);
    while (at < key.length) {
      int begin = content(key, at);
      int end = begin + length(key, at);
      if ((key[at] & 0xff) == CURVE) {
        return Arrays.copyOfRange(key, begin, end);
      }
      at = end;
    }
    throw new IllegalArgumentException("no curve");
  }

  /** The place where the content of an element begins. */
  private static int content(byte[] der, int at) {
    int first = der[at + 1] & 0xff;
    return at + 2 + (first < 128 ? 0 : first - 128);
  }

  /** The length of an element's content. */
  private static int length(byte[] der, int at) {
    int length = der[at + 1] & 0xff;
    if (length < 128) {
      return length;
    }
    int sum = 0;
    for (int i = at + 2; i < content(der, at); i++) {
      sum = sum << 8 | der[i] & 0xff;
    }
    return sum;
  }
}
