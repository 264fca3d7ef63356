"""PNG files without a library: 8 bits a channel, not interlaced; grey, RGB and palette, alpha left out.

zlib is in Python, and that is all a PNG needs. Other files are refused with what to do about them. Rows with the
filters 3 and 4 are undone byte by byte in Python: about 0.1 s for a picture of 256 x 256.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
PALETTE = 3
Bytes = NDArray[np.uint8]


def write_png(path: Path, image: Bytes) -> None:
    """`image` (3, height, width) as RGB."""
    _, height, width = image.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a row is its filter: none
    rows[:, 1:] = image.transpose(1, 2, 0).reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")]
    path.write_bytes(SIGNATURE + b"".join(_chunk(kind, data) for kind, data in body))


def read_png(path: Path) -> Bytes:
    """(3, height, width)."""
    try:
        return _decode(path.read_bytes())
    except (ValueError, struct.error, zlib.error) as error:
        raise UserError(
            f"the picture {path}",
            f"no PNG that can be read here: {error}",
            "save it as an 8-bit RGB PNG, not interlaced",
        ) from None


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if not data.startswith(SIGNATURE):
        raise ValueError("it does not begin as a PNG does")
    at, kind = len(SIGNATURE), b""
    while kind != b"IEND":
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (expected,) = struct.unpack_from(">I", data, at + 8 + length)
        if zlib.crc32(kind + body) != expected:
            raise ValueError(f"its part {kind.decode('latin-1')} is damaged")
        yield kind, body
        at += 12 + length


def _decode(data: bytes) -> Bytes:
    parts: dict[bytes, bytes] = {}
    for kind, body in _chunks(data):
        parts[kind] = parts.get(kind, b"") + body  # the picture may come in several
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", parts.get(b"IHDR", b""))
    if depth != 8 or interlaced or colour not in CHANNELS:
        raise ValueError(f"{depth} bits, colour type {colour}{', interlaced' * bool(interlaced)}")
    channels = CHANNELS[colour]
    raw = np.frombuffer(zlib.decompress(parts.get(b"IDAT", b"")), np.uint8)
    if raw.size != height * (1 + width * channels):
        raise ValueError("it holds another number of pixels than it says")
    rows = raw.reshape(height, 1 + width * channels)
    pixels = _unfiltered(rows, channels).reshape(height, width, channels)
    if colour == PALETTE:
        colours = np.frombuffer(parts.get(b"PLTE", b""), np.uint8).reshape(-1, 3)
        if pixels.size and int(pixels.max()) >= len(colours):
            raise ValueError("a pixel has a colour that is not in its palette")
        pixels = colours[pixels[:, :, 0]]
    picked = [0, 0, 0] if pixels.shape[2] < 3 else [0, 1, 2]
    return np.ascontiguousarray(pixels[:, :, picked].transpose(2, 0, 1))


def _unfiltered(rows: Bytes, step: int) -> Bytes:
    """Each row says how it was written as a difference to what lies left of it and above it."""
    found = np.zeros((len(rows), rows.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1] - 1, np.uint8)
    for number, row in enumerate(rows):
        kind, line = int(row[0]), row[1:]
        if kind == 0:
            above = line
        elif kind == 1:  # left; a running sum of each channel, modulo 256
            above = np.cumsum(line.reshape(-1, step), axis=0, dtype=np.uint8).reshape(-1)
        elif kind == 2:  # above
            above = line + above
        elif kind in (3, 4):
            above = _byte_by_byte(line.tolist(), above.tolist(), step, kind)
        else:
            raise ValueError(f"a row has the filter {kind}, which does not exist")
        found[number] = above
    return found


def _byte_by_byte(line: list[int], above: list[int], step: int, kind: int) -> Bytes:
    padding = [0] * step
    left, corner = padding + line, padding + above  # `left` is completed as we go: at i lies what is `step` before i
    for i, up in enumerate(above):
        a, c = left[i], corner[i]
        if kind == 3:
            guess = (a + up) // 2
        else:  # whichever of left, above and corner is nearest to left + above - corner
            da, db, dc = abs(up - c), abs(a - c), abs(a + up - 2 * c)
            guess = a if da <= db and da <= dc else up if db <= dc else c
        left[i + step] = (line[i] + guess) & 255
    return np.array(left[step:], np.uint8)
