"""Writes down which other engines have the same bits (--same-bits): those of all that does not name ranks."""

import hashlib
from pathlib import Path

import torch

import hemiola
from hemiola.builder.checkpoint import file_in, shard_names
from hemiola.builder.formats.declared import MODELOPT
from hemiola.builder.hashes import hash_files
from hemiola.builder.options import Options
from hemiola.plugins.gpu.binaries import sources
from hemiola.runtime.progress import HASHING_CHECKPOINT, Report
from hemiola.runtime.same_bits import FILE, SameBits


def write_same_bits(
    engine_dir: Path, checkpoint: Path, options: Options, num_kv_heads: int, report: Report
) -> None:
    """Not for random weights, which each rank draws for itself."""
    if not options.same_bits or options.random_weights:
        return
    digest = hashlib.sha256(repr((hemiola.__version__, torch.__version__, sources())).encode())
    digest.update(options.model_dump_json(exclude={"tp", "revision"}).encode())
    names = ("config.json", MODELOPT, *shard_names(checkpoint))  # what else is there, is not read
    files = sorted(path for name in names if (path := file_in(checkpoint, name)))
    for path, sha256 in zip(files, hash_files(files, HASHING_CHECKPOINT, report), strict=True):
        digest.update(path.name.encode() + bytes.fromhex(sha256))
    made = SameBits(bits=digest.hexdigest(), num_kv_parts=min(options.tp, num_kv_heads))
    (engine_dir / FILE).write_text(made.model_dump_json() + "\n")
