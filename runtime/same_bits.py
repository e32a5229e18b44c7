"""What engines of any number of ranks have in common that were built with --same-bits: `same_bits.json`.

Their pages and states have the same bits, so one takes the prefixes of another (cache/packed.py).
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import read_text
from hemiola.runtime.outline import Digest, Frozen, Size

FILE = "same_bits.json"


class SameBits(Frozen):
    bits: Digest  # of all that the bits depend on: the checkpoint, the options, the versions
    num_kv_parts: Size  # ranks that have heads of keys and values of their own


def load_same_bits(engine_dir: Path, sha256: Mapping[str, str], tp: int) -> SameBits | None:
    """sha256: of the engine's files, which were compared with it."""
    if FILE not in sha256:
        return None
    path, way_out = engine_dir / FILE, "run build-engine again"
    try:
        same_bits = SameBits.model_validate_json(read_text(path, way_out, 2**12), strict=True)
    except ValidationError:
        same_bits = None
    if same_bits is None or tp % same_bits.num_kv_parts:
        message = f"{path} is not what a build writes for {tp} ranks"
        raise Refused("damaged", message=message, way_out=way_out)
    return same_bits
