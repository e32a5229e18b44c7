"""Token ids that a checkpoint's configs name: each must be one of the vocabulary."""

from collections.abc import Iterable, Iterator

from hemiola.builder.checkpoint import Config
from hemiola.runtime.outline import MOST_EOS

KEYS = ("eos_token_id", "bos_token_id", "pad_token_id")
NO_PAD = -1  # as some configs say that there is none


def refuse_unknown_ids(configs: Iterable[Config], vocab_size: int) -> None:
    """An id outside of the vocabulary ends no text, and on a GPU it would be a write behind a table."""
    for config in configs:
        for key, token_id in _ids(config):
            if not 0 <= token_id < vocab_size and (key, token_id) != ("pad_token_id", NO_PAD):
                reason = f"{key} holds {token_id}, the vocabulary is 0..{vocab_size - 1}"
                raise config.refused("out_of_range", key, reason, "correct one of them")


def _ids(config: Config) -> Iterator[tuple[str, int]]:
    for key in KEYS:
        if key in config:
            found = config.read(key, int | list[int])  # type: ignore[arg-type]
            ids = found if isinstance(found, list) else [found]
            if len(ids) > MOST_EOS:
                reason = f"{key} holds {len(ids)} ids, at most {MOST_EOS} are read"
                raise config.refused("too_long", key, reason, "correct it")
            yield from ((key, token_id) for token_id in ids)
