"""Bytes of a log file in chunks, uncompressed and as UTF-8, from any position on.

Positions count bytes of the uncompressed UTF-8 text. In a plain file they are looked up; a
compressed or UTF-16 file is read from its start and what lies before the position is thrown away.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

CHUNK = 256 * 1024
PEEK = 64 * 1024
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_MARKS: tuple[tuple[bytes, str], ...] = (  # the longer one first: UTF-32 begins like UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
Read = Callable[[int], bytes]


class CutShort(Exception):
    """The compressed data ends or breaks in the middle. All that came before was delivered."""


def peek(path: Path) -> bytes:
    """The first bytes of the text, at most PEEK; fewer where the file is cut."""
    found = b""
    try:
        for chunk in chunks(path):
            found += chunk
            if len(found) >= PEEK:
                break
    except CutShort:
        pass
    return found[:PEEK]


def chunks(path: Path, position: int = 0) -> Iterator[bytes]:
    """Text of the file from `position` on. OSError when it cannot be opened; CutShort at the end
    of a compressed file that is not whole."""
    with path.open("rb") as file:
        head = file.read(4)
        codec = _codec(head)
        encoding = _encoding(head) if codec is None else None
        if codec is None and encoding is None:
            file.seek(position)
            yield from iter(lambda: file.read(CHUNK), b"")
            return
    if codec == "zstd":
        raw = _zstd(path)
    elif codec == "gzip":
        raw = _gzip(path)
    else:
        raw = _plain(path)
    yield from _skip(_as_utf8(raw), position)


def _codec(head: bytes) -> str | None:
    if head.startswith(_GZIP):
        return "gzip"
    return "zstd" if head.startswith(_ZSTD) else None


def _encoding(head: bytes) -> str | None:
    return next((name for mark, name in _MARKS if head.startswith(mark)), None)


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(CHUNK), b"")


def _gzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        try:
            # read1 hands out what it has before it finds the end missing; read would lose it.
            yield from iter(lambda: file.read1(CHUNK), b"")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CutShort(f"gzip: {error}") from error


def _zstd(path: Path) -> Iterator[bytes]:
    """Arrow loses what it read in the call that meets the end, so the last bytes of a cut file are
    read again in smaller and smaller steps."""
    done = 0
    for step in (CHUNK, 1024, 1):
        try:
            with pa.input_stream(str(path), compression="zstd") as file:
                left = done
                while left:
                    left -= len(file.read(min(left, CHUNK)))
                while chunk := file.read(step):
                    done += len(chunk)
                    yield chunk
            return
        except OSError as error:
            problem = error
    raise CutShort(f"zstd: {problem}") from problem


def _as_utf8(raw: Iterator[bytes]) -> Iterator[bytes]:
    """Recode a text that begins with a UTF-16 or UTF-32 mark; anything else passes unchanged."""
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    for chunk in raw:
        if first:
            first, name = False, _encoding(chunk[:4])
            # A broken pair becomes a byte that no UTF-8 text has, so that its row is refused.
            decoder = codecs.getincrementaldecoder(name)("replace") if name else None
        if decoder is None:
            yield chunk
        else:
            yield decoder.decode(chunk).replace("\ufffd", "\udcff").encode("utf-8", _ESCAPE)


_ESCAPE = "surrogateescape"


def _skip(raw: Iterator[bytes], count: int) -> Iterator[bytes]:
    for chunk in raw:
        if count >= len(chunk):
            count -= len(chunk)
            continue
        yield chunk[count:] if count else chunk
        count = 0
