"""HighwayHash-128 (google/highwayhash), which keys the digests of producers' batches. Pure Python: slow, and enough."""

import struct

MASK, LOW = (1 << 64) - 1, (1 << 32) - 1
# Digits of pi, as the hash defines them.
MUL0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
MUL1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)
LANES = struct.Struct("<4Q")


def turned(word):
    """A word with its halves exchanged."""
    return word >> 32 | (word & LOW) << 32


def zipped(high, low):
    """What two lanes of 64 bits add to the other half of the state, as two words: the bytes of both, in a fixed order."""
    data = struct.pack("<QQ", low, high)
    return struct.unpack("<QQ", bytes(data[at] for at in (3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7)))


def update(state, lanes):
    v0, v1, mul0, mul1 = state
    for i in range(4):
        v1[i] = (v1[i] + mul0[i] + lanes[i]) & MASK
        mul0[i] ^= (v1[i] & LOW) * (v0[i] >> 32)
        v0[i] = (v0[i] + mul1[i]) & MASK
        mul1[i] ^= (v0[i] & LOW) * (v1[i] >> 32)
    for to, of in ((v0, v1), (v1, v0)):
        for i in (0, 2):
            low, high = zipped(of[i + 1], of[i])
            to[i], to[i + 1] = (to[i] + low) & MASK, (to[i + 1] + high) & MASK


def last_packet(rest):
    """The packet for what is left of the data, less than 32 bytes."""
    size, whole = len(rest), len(rest) & ~3
    packet = bytearray(rest[:whole].ljust(32, b"\0"))
    if size & 16:
        packet[28:] = rest[-4:]
    elif size & 3:
        packet[16:19] = bytes((rest[whole], rest[whole + (size & 3) // 2], rest[-1]))
    return packet


def hash128(key, data):
    """The hash of data with a key of 32 bytes: 16 bytes, the low half first, each half little endian."""
    words = LANES.unpack(key)
    state = ([a ^ b for a, b in zip(MUL0, words)], [a ^ turned(b) for a, b in zip(MUL1, words)], list(MUL0), list(MUL1))
    whole = len(data) & ~31
    for at in range(0, whole, 32):
        update(state, LANES.unpack_from(data, at))
    v0, v1, mul0, mul1 = state
    size = len(data) - whole
    if size:
        for i in range(4):
            v0[i] = (v0[i] + (size << 32) + size) & MASK
            halves = (v1[i] & LOW, v1[i] >> 32)
            low, high = ((half << size | half >> (32 - size)) & LOW for half in halves)
            v1[i] = low | high << 32
        update(state, LANES.unpack(last_packet(data[whole:])))
    for _ in range(6):
        update(state, [turned(v0[i]) for i in (2, 3, 0, 1)])
    return struct.pack("<QQ", (v0[0] + mul0[0] + v1[2] + mul1[2]) & MASK, (v0[1] + mul0[1] + v1[3] + mul1[3]) & MASK)
