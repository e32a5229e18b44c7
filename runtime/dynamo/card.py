"""The folder that a model's card names: what Dynamo's frontend needs to make token ids out of a text."""

import json
import os
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import Manifest

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_card(engine_dir: Path, manifest: Manifest) -> Path:
    """A folder in the user's cache, one for each content, which the workers of a machine share: a frontend
    may read it when the worker that made it is gone. The identity in it keeps engines of other bits apart:
    Dynamo serves workers with one card only."""
    if not manifest.has_tokenizer:
        message = f"{engine_dir} has no tokenizer, Dynamo's frontend needs one"
        raise Refused("unsupported", message=message, way_out="build from a checkpoint that has one")
    source = engine_dir / "tokenizer"
    config = {
        "model_type": "hemiola",
        "architectures": [manifest.architecture],
        "hemiola_identity": manifest.identity,
        "eos_token_id": list(manifest.eos_ids),
        "vocab_size": manifest.vocab_size,
        "max_position_embeddings": manifest.limits.max_len,
    }
    contents = {name: (source / name).read_bytes() for name in FILES if (source / name).is_file()}
    contents["config.json"] = json.dumps(config).encode()
    digest = sha256(repr(sorted(contents.items())).encode()).hexdigest()[:32]
    folder = _cache() / "dynamo" / digest
    if not all(_is_there(folder / name, content) for name, content in contents.items()):
        _write(folder, contents)
    return folder


def _is_there(path: Path, content: bytes) -> bool:
    """A machine that lost its power may have left a part."""
    return path.is_file() and path.read_bytes() == content


def _cache() -> Path:
    """Frontends stand in other folders, where a relative path leads elsewhere."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    return (root if root.is_absolute() else Path.home() / ".cache") / "hemiola"


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    """Whole or not at all; another worker may be about to do the same."""
    made = folder.with_name(f"{folder.name}.{token_hex(8)}")  # containers share folders and process ids
    made.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (made / name).write_bytes(content)
    try:
        made.rename(folder)
    except OSError:  # it is there, damaged or made just now
        for name in contents:
            (made / name).replace(folder / name)
        made.rmdir()
