"""PNG files without a library: 8 bits a channel, not interlaced; grey, RGB and palette; alpha is dropped.

zlib is part of Python, and a PNG needs nothing else. Other files are refused, with advice. Rows with the filters 3
and 4 are decoded byte by byte in Python: about 0.1 s for a picture of 256 x 256.
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

# Width, height, bits, colour type, compression, filter method, interlacing.
HEADER = ">IIBBBBB"

# Channels by colour type.
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
RGB = 2
PALETTE = 3

Bytes = NDArray[np.uint8]


def write_png(path: Path, image: Bytes) -> None:
    """Write `image` (3, height, width) as RGB."""
    _, height, width = image.shape

    # The first byte of a row is its filter; 0 is none.
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = image.transpose(1, 2, 0).reshape(height, -1)

    header = _chunk(b"IHDR", struct.pack(HEADER, width, height, 8, RGB, 0, 0, 0))
    path.write_bytes(SIGNATURE + header + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + _chunk(b"IEND", b""))


def read_png(path: Path) -> Bytes:
    """Return the picture (3, height, width)."""
    try:
        return _decode(path.read_bytes())
    except (ValueError, struct.error, zlib.error) as error:
        raise UserError(
            f"the picture {path} is not a PNG that can be read: {error}",
            "",
            "save it as an 8-bit RGB PNG, not interlaced",
        ) from None


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of every chunk, up to the end of the picture."""
    if not data.startswith(SIGNATURE):
        raise ValueError("it does not begin as a PNG does")

    at = len(SIGNATURE)
    kind = b""
    while kind != b"IEND":
        # A chunk is its length, kind, content and checksum.
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)

        # A damaged picture must not be trained on.
        if zlib.crc32(kind + body) != checksum:
            raise ValueError(f"its part {kind.decode('latin-1')} is damaged")

        yield kind, body
        at += 12 + length


def _decode(data: bytes) -> Bytes:
    # The pixels may be spread over several chunks.
    parts: dict[bytes, bytes] = {}
    for kind, body in _chunks(data):
        parts[kind] = parts.get(kind, b"") + body

    width, height, depth, colour, _, _, interlaced = struct.unpack(HEADER, parts.get(b"IHDR", b""))
    if depth != 8 or interlaced or colour not in CHANNELS:
        raise ValueError(f"{depth} bits, colour type {colour}{', interlaced' * bool(interlaced)}")

    # Every row is one byte for its filter, then the pixels.
    channels = CHANNELS[colour]
    raw = np.frombuffer(zlib.decompress(parts.get(b"IDAT", b"")), np.uint8)
    if raw.size != height * (1 + width * channels):
        raise ValueError("it does not hold the number of pixels that its header says")

    pixels = _unfiltered(raw.reshape(height, 1 + width * channels), channels).reshape(height, width, channels)
    if colour == PALETTE:
        palette = np.frombuffer(parts.get(b"PLTE", b""), np.uint8).reshape(-1, 3)
        if pixels.size and int(pixels.max()) >= len(palette):
            raise ValueError("a pixel has a colour that is not in its palette")

        pixels = palette[pixels[:, :, 0]]

    # Grey becomes three equal channels; alpha is dropped.
    picked = [0, 0, 0] if pixels.shape[2] < 3 else [0, 1, 2]
    return np.ascontiguousarray(pixels[:, :, picked].transpose(2, 0, 1))


def _unfiltered(rows: Bytes, step: int) -> Bytes:
    """Undo the filters of all rows: each row was written as differences to the bytes left of it and above it."""
    pixels = np.zeros_like(rows[:, 1:])

    # Above the first row everything counts as 0.
    above = np.zeros_like(rows[0, 1:])
    for number, row in enumerate(rows):
        kind, line = int(row[0]), row[1:]
        if kind == 0:
            above = line
        elif kind == 1:
            # Left: a running sum of each channel, modulo 256.
            above = np.cumsum(line.reshape(-1, step), axis=0, dtype=np.uint8).reshape(-1)
        elif kind == 2:
            above = line + above
        elif kind in (3, 4):
            above = _byte_by_byte(line.tolist(), above.tolist(), step, kind)
        else:
            raise ValueError(f"a row has the filter {kind}, which does not exist")

        pixels[number] = above

    return pixels


def _byte_by_byte(line: list[int], above: list[int], step: int, kind: int) -> Bytes:
    """Undo the filters 3 (mean of left and above) and 4 (Paeth), which need each decoded byte for the next one."""
    # Decoded bytes are appended to `left`: at i lies the one that is `step` before i.
    left = [0] * step + line
    corner = [0] * step + above
    for i, up in enumerate(above):
        a, c = left[i], corner[i]
        if kind == 3:
            guess = (a + up) // 2
        else:
            # The nearest of left, above and corner to left + above - corner; the first of them on a tie.
            to_left, to_above, to_corner = abs(up - c), abs(a - c), abs(a + up - 2 * c)
            if to_left <= to_above and to_left <= to_corner:
                guess = a
            else:
                guess = up if to_above <= to_corner else c

        left[i + step] = (line[i] + guess) & 255

    return np.array(left[step:], np.uint8)
