"""Bytes of a data directory, as storage/FORMAT.md describes them. Pure: bytes in, values out."""

import struct
from dataclasses import dataclass, field

import crc32c as _crc32c
import lz4.block
import xxhash
import zstandard

from highway import hash128

LIFE_BLOCK = 4096
FIRST_FRAME = 2 * LIFE_BLOCK
HEADER = 64
NO_LAG = 0xFFFFFFFF
NONE = 0xFFFFFFFFFFFFFFFF
NEVER = -(1 << 63)
# Positions of a journal and lsns are below this.
POSITIONS = 1 << 62

(BATCH, CREATED, CONFIGURED, DELETED, TRIM, FENCE, CURSOR, LINK, MARKER, RUN, SEAL, IMAGES, PACK, ORDER,
 FORGOTTEN) = range(1, 16)
KINDS = {BATCH: "batch", CREATED: "created", CONFIGURED: "configured", DELETED: "deleted", TRIM: "trim",
         FENCE: "fence", CURSOR: "cursor", LINK: "link", MARKER: "marker", RUN: "run", SEAL: "seal", IMAGES: "images",
         PACK: "pack", ORDER: "order", FORGOTTEN: "forgotten"}
PRODUCER, KEYED_PRODUCER, DIRECTORY, PIECES = 1, 2, 3, 4
# Read-only-compatible feature: a key lies behind the life block's checksum.
KEYED_DIGESTS = 1
# Read-only-compatible feature: indexes and runs tell changes of producers.
PRODUCER_CHANGES = 2
GOES_ON = 0x80


class Bad(Exception):
    """Bytes that are not what they should be; the message says which rule they break."""


def crc(data, before=0):
    return _crc32c.crc32c(data, before)


def varint(data, at):
    """A varint: (value, where it ends)."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Bad("a varint is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & NONE, at
        shift += 7


def zigzag(value):
    return (value >> 1) ^ -(value & 1)


def signed(value):
    return value - (1 << 64) if value >> 63 else value


def fields(data):
    """Fields of a message in protobuf wire format, in order: (number, value)."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire in (1, 2, 5):
            length, at = {1: (8, at), 5: (4, at)}.get(wire) or varint(data, at)
            value = data[at:at + length]
            if len(value) < length:
                raise Bad("a field is cut off")
            at += length
            if wire != 2:
                value = int.from_bytes(value, "little")
        else:
            raise Bad(f"wire type {wire}")
        yield tag >> 3, value


def message(data):
    """The last value of each field."""
    return dict(fields(data))


# Life block

LIFE = struct.Struct("<8sIIIIQQQ16sI")
KEY_END = LIFE.size + 32


@dataclass
class Life:
    """Who a segment file is in this life."""
    version: int
    compatible: int
    read_only: int
    incompatible: int
    segment: int
    size: int
    salt: bytes
    store: bytes
    key: bytes | None = None


def life_block(data):
    """A life block, or Bad."""
    if len(data) < LIFE.size:
        raise Bad("shorter than a life block")
    magic, version, compatible, read_only, incompatible, segment, size, salt, store, stated = LIFE.unpack_from(data)
    if magic != b"WALDSEG\0":
        raise Bad("no life block")
    if crc(data[:LIFE.size - 4]) != stated:
        raise Bad("the life block's checksum is wrong")
    key = data[LIFE.size:KEY_END] if read_only & KEYED_DIGESTS else None
    if crc(data[:KEY_END]).to_bytes(4, "little") != data[KEY_END:KEY_END + 4]:
        # The life block serves without its key: another copy or segment has that.
        key = None
    return Life(version, compatible, read_only, incompatible, segment, size, salt.to_bytes(8, "little"), store, key)


# Frames

FRAME = struct.Struct("<IHBBIIIB3sQQQqII")


@dataclass
class Frame:
    """A frame whose header verified."""
    offset: int
    kind: int
    position: int
    log: int
    first_lsn: int
    count: int
    arrival: int
    header_crc: int
    chain: int
    durable: int | None
    goes_on: bool
    codec: int
    head: int
    body_length: int
    body_crc: int
    extensions: dict = field(default_factory=dict)
    body: bytes | None = None

    @property
    def size(self):
        return self.head + padded(self.body_length)

    @property
    def end(self):
        return self.position + self.size


def padded(length):
    return -(-length // 8) * 8


def frame_header(data, offset, salt, base):
    """The frame at an offset of a segment, without its body, if its header verifies; else None.

    `base` is the segment's base, or None if it is not known yet.
    """
    if offset + HEADER > len(data):
        return None
    (stated, units, version, kind, body_length, body_crc, count, flags, zero, position, log, first_lsn, arrival,
     lag, chain) = FRAME.unpack_from(data, offset)
    head = units * 8
    if version != 1 or kind not in KINDS or head < HEADER or offset + head > len(data) or zero != bytes(3):
        return None
    if base is not None and position != base + offset:
        return None
    # What no store gets to: addresses of runs begin with 2^63.
    if POSITIONS <= position < 1 << 63 or (kind != FENCE and first_lsn >= POSITIONS):
        return None
    if crc(data[offset + 4:offset + head], crc(salt)) != stated:
        return None
    durable = None if lag == NO_LAG else position - lag * 8
    frame = Frame(offset, kind, position, log, first_lsn, count, arrival, stated, chain, durable,
                  bool(flags & GOES_ON), flags & 7, head, body_length, body_crc)
    at = offset + HEADER
    while at < offset + head:
        number, _, length = struct.unpack_from("<HHI", data, at)
        frame.extensions[number] = bytes(data[at + 8:at + 8 + length])
        at += 8 + padded(length)
    return frame


def frame_body(data, frame):
    """The body as stored, or None if it does not verify."""
    at = frame.offset + frame.head
    body = bytes(data[at:at + frame.body_length])
    if len(body) < frame.body_length or crc(body) != frame.body_crc:
        return None
    return body


# No body is larger than this when it is plain, bytes. FORMAT may allow more: the largest of all stores that
# were opened counts.
LARGEST_BODY = 64 << 20
allowed = LARGEST_BODY


def allow(largest_body):
    """Sets the size up to which bodies are decompressed, in bytes."""
    global allowed
    allowed = max(allowed, largest_body)


# Bit of a codec: the body is encrypted.
ENCRYPTED = 4
# Key, time of the first and of the last record, size when it is plain; a nonce, the encrypted bytes and a tag follow.
SEALED = struct.Struct("<QqqI")
LEAST_SEALED = SEALED.size + 12 + 16


def sealed(frame):
    """The key of an encrypted body, the times of its first and last record, and its size when it is plain; else None."""
    if not frame.codec & ENCRYPTED:
        return None
    if len(frame.body) < LEAST_SEALED:
        raise Bad(f"the encrypted body of the frame at {frame.position} is too short")
    return SEALED.unpack_from(frame.body)


def plain(frame):
    """The body as it was before it was compressed."""
    if frame.codec == 0:
        return frame.body
    size = int.from_bytes(frame.body[:4], "little")
    if size > allowed:
        raise Bad(f"the body of the frame at {frame.position} claims {size} bytes decompressed, above {allowed}")
    if frame.codec == 1:
        return lz4.block.decompress(frame.body[4:], uncompressed_size=size)
    if frame.codec == 2:
        return zstandard.ZstdDecompressor().decompress(frame.body[4:], max_output_size=size)
    raise Bad(f"codec {frame.codec}")


def records(frame):
    """The records of a batch, as dicts in the words of the output. Of encrypted ones only lsn and time are known, and
    the time only of the first and the last."""
    if encrypted := sealed(frame):
        key, first, last, _ = encrypted
        return [{"lsn": frame.first_lsn + at, "time_us": first if at == 0 else last, "key": key, "data": b"", "headers": []}
                for at in range(frame.count)]
    found = []
    for number, value in fields(plain(frame)):
        if number != 3:
            raise Bad(f"field {number} among records")
        record = {"lsn": frame.first_lsn + len(found), "time_us": frame.arrival, "data": b"", "headers": []}
        for key, content in fields(value):
            if key == 1:
                record["data"] = content
            elif key == 2:
                header = message(content)
                record["headers"].append([header.get(1, b"").decode(), header.get(2, b"")])
            elif key == 3:
                record["time_us"] = signed(content) or frame.arrival
            elif key == 4:
                record["crc32c"] = content
            else:
                raise Bad(f"field {key} of a record")
        found.append(record)
    if len(found) != frame.count:
        raise Bad(f"{len(found)} records instead of {frame.count}")
    return found


@dataclass
class Told:
    """What a directory tells of one frame."""
    position: int
    kind: int
    size: int
    log: int
    first_lsn: int
    count: int
    name: str | None


def directory(data):
    """The frames that a directory tells of, in order."""
    position, at = varint(data, 0)
    found = []
    while at < len(data):
        kind = data[at]
        values = []
        at += 1
        for _ in range(4):
            value, at = varint(data, at)
            values.append(value)
        units, log, first_lsn, count = values
        length, at = varint(data, at)
        name = data[at:at + length].decode() or None
        at += length
        found.append(Told(position, kind, units * 8, log, first_lsn, count, name))
        position += units * 8
    return found


@dataclass
class Sent:
    """Whose batch a frame is, by its extension 1 or 2. The digest has 8 bytes, or 16 if it is keyed."""
    producer: bytes
    epoch: int
    sequence: int
    digest: bytes


def producer(frame):
    keyed = frame.extensions.get(KEYED_PRODUCER)
    data, end = (frame.extensions.get(PRODUCER), 24) if keyed is None else (keyed, 32)
    if data is None:
        return None
    epoch, sequence = struct.unpack_from("<QQ", data)
    return Sent(data[end:], epoch, sequence, data[16:end])


def part(value):
    return len(value).to_bytes(8, "little") + value


def sent_digest(records_message, key):
    """The digest of a producer's batch, if the stored records are those that were sent. Without a key it is a plain one."""
    parts = []
    for _, record in fields(records_message):
        data, headers, time, checksum = b"", [], b"", b""
        for number, content in fields(record):
            if number == 1:
                data = content
            elif number == 2:
                header = message(content)
                headers.append((header.get(1, b""), header.get(2, b"")))
            elif number == 3:
                time = content.to_bytes(8, "little")
            elif number == 4:
                checksum = content.to_bytes(4, "little")
        parts += [data, len(headers).to_bytes(8, "little"), *(one for header in headers for one in header), time, checksum]
    hashed = b"".join(map(part, parts))
    return xxhash.xxh3_64_digest(hashed)[::-1] if key is None else hash128(key, hashed)


def bytes_digest(data):
    return xxhash.xxh3_128_digest(data)
