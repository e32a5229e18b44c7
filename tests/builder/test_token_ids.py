"""Token ids outside of the vocabulary: refused by name where an engine is built, and where it is opened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hemiola.builder.build import build
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.options import Options
from hemiola.builder.random_weights import RandomTensors
from hemiola.builder.token_ids import refuse_unknown_ids
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

Get = Callable[..., Path]
VOCAB = 320
SMALL = Options(max_len=64, max_rows=2, max_step_tokens=64, page_len=32, chunk_len=16)
WRONG = [
    ("generation_config.json", "eos_token_id", VOCAB),
    ("generation_config.json", "eos_token_id", [0, 2**40]),
    ("generation_config.json", "bos_token_id", -1),
    ("generation_config.json", "pad_token_id", VOCAB),
    ("config.json", "eos_token_id", -1),
    ("config.json", "bos_token_id", VOCAB),
    ("config.json", "pad_token_id", -2),
]


@pytest.fixture
def checkpoint(tiny_checkpoint: Get, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "checkpoint")


def write(path: Path, key: str, value: object) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | {key: value}))


@pytest.mark.parametrize(("file", "key", "value"), WRONG)
def test_an_engine_is_not_built_with_a_token_id_outside_of_the_vocabulary(
    checkpoint: Path, tmp_path: Path, file: str, key: str, value: object
) -> None:
    write(checkpoint / file, key, value)
    wrong = value[-1] if isinstance(value, list) else value
    with pytest.raises(Refused) as refused:
        build(checkpoint, tmp_path / "engine", SMALL)
    said = f"{file}: {key} holds {wrong}, the vocabulary is 0..{VOCAB - 1}; correct one of them"
    assert str(refused.value).endswith(said) and not (tmp_path / "engine").exists()


def test_the_nested_config_of_a_text_model_is_looked_at_as_well(tmp_path: Path) -> None:
    config = {"architectures": ["Any"], "pad_token_id": -1, "bos_token_id": None, "text_config": {}}
    config["text_config"] = {"eos_token_id": [1, VOCAB]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path, RandomTensors)
    refuse_unknown_ids([checkpoint.config], VOCAB)
    with pytest.raises(Refused, match="text_config: eos_token_id holds 320"):
        refuse_unknown_ids(checkpoint.token_configs(checkpoint.config.section("text_config")), VOCAB)


def test_a_million_end_tokens_are_a_set_for_each_request(checkpoint: Path, tmp_path: Path) -> None:
    write(checkpoint / "config.json", "eos_token_id", [5] * 1001)
    with pytest.raises(Refused, match="eos_token_id holds 1001 ids, at most 1000 are read; correct it"):
        build(checkpoint, tmp_path / "engine", SMALL)


@pytest.mark.parametrize("token_id", [VOCAB, -1, 2**40])
def test_an_end_token_that_a_hand_wrote_into_a_manifest_does_not_reach_the_device(
    tiny_engine: Get, tmp_path: Path, token_id: int
) -> None:
    engine = shutil.copytree(tiny_engine("qwen3_5"), tmp_path / "engine")
    found = manifest.parse(engine / manifest.FILE)
    found.model_copy(update={"eos_ids": (0, token_id)}).write(engine)
    with pytest.raises(Refused) as refused:
        LLM(engine, max_rows=1, max_len=64)
    assert str(refused.value) == (
        f"{engine / manifest.FILE}: eos_ids holds {token_id}, the vocabulary is 0..{VOCAB - 1};"
        " run build-engine again"
    )
