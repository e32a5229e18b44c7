"""What engines of any number of ranks have in common that were built with --same-bits: `same_bits.json`.

Their pages and states have the same bits, so one takes the prefixes of another (cache/packed.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hemiola.runtime.errors import Refused

FILE = "same_bits.json"


class SameBits(NamedTuple):
    bits: str  # sha256 of all that the bits depend on: the checkpoint, the options, the versions
    num_kv_parts: int  # ranks that have heads of keys and values of their own


def load_same_bits(engine_dir: Path, sha256: Mapping[str, str]) -> SameBits | None:
    """sha256: of the engine's files, which were compared with it."""
    if FILE not in sha256:
        return None
    try:
        return SameBits(**json.loads((engine_dir / FILE).read_bytes()))
    except (ValueError, TypeError):
        message = f"{engine_dir / FILE} is not what a build writes"
        raise Refused("damaged", message=message, way_out="run build-engine again") from None
