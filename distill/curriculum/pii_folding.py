"""Look-alike characters as the plain ones, so that a number in full-width digits is a number."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def fold(text: str) -> tuple[str, npt.NDArray[np.intp] | None]:
    """(text with look-alikes as ASCII and without invisible characters, the original position of
    each character or None where nothing moved)."""
    if text.isascii():
        return text, None
    import numpy as np

    changed = _folding()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")]
    places = None
    if changed.max() == _GONE:
        places = np.flatnonzero(changed != _GONE)
        changed = changed[places]
    return changed.tobytes().decode("utf-32-le", "surrogatepass"), places


_GONE = 0xFFFFFFFF


@cache
def _folding() -> npt.NDArray[np.uint32]:
    """Code point -> what it stands for: [0x110000] of code points, or _GONE."""
    import numpy as np

    table = np.arange(0x110000, dtype="<u4")
    likely = [*range(0xA0, 0x100), *range(0x300, 0x3040), *range(0xA600, 0xAC00)]
    likely += [*range(0xF900, 0x10000), *range(0x10400, 0x12000), *range(0x1D400, 0x1D800)]
    for code in [*likely, *range(0x1E000, 0x1F000), *range(0xE0000, 0xE0200)]:
        char = chr(code)
        kind = unicodedata.category(char)
        if kind == "Cf" or code == 0x34F or 0xFE00 <= code <= 0xFE0F:
            table[code] = _GONE
        elif kind == "Nd":
            table[code] = 48 + unicodedata.digit(char)
        elif kind == "Pd" or code == 0x2212:
            table[code] = 45
        elif kind == "Zs":
            table[code] = 32
        else:
            plain = unicodedata.normalize("NFKC", char)
            if len(plain) == 1 and plain.isascii():
                table[code] = ord(plain)
    return table
