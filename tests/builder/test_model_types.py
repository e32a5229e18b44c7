"""Which model_type each architecture has, at the top of config.json and within text_config."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from kit import checkpoints

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.models import MODEL_TYPES
from hemiola.plugins import references
from hemiola.runtime.errors import Refused

KNOWN = sorted({name for pair in MODEL_TYPES.values() for name in pair if name})


def refusal(folder: Path, architecture: str, whole: str | None, text: str | None) -> str:
    """Of a checkpoint without tensors; None: the config does not say it."""
    folder.mkdir(exist_ok=True)
    content: dict = {"architectures": [architecture]} | ({"model_type": whole} if whole else {})
    if text is not None:
        content["text_config"] = {"model_type": text}
    (folder / "config.json").write_text(json.dumps(content))
    checkpoints.write_tensors(folder, {"a": torch.zeros(1)}, 1)
    with pytest.raises(Refused) as refused:
        models.load(Checkpoint(folder), references, chunk_len=16, max_len=64)
    return str(refused.value)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_the_types_are_those_of_transformers(architecture: str) -> None:
    whole, text = MODEL_TYPES[architecture]
    kind = getattr(transformers, architecture).config_class
    assert whole == kind.model_type
    assert text == (kind.sub_configs["text_config"].model_type if text else None)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_a_type_of_another_architecture_is_refused_wherever_it_stands(
    tmp_path: Path, architecture: str
) -> None:
    whole, text = MODEL_TYPES[architecture]
    inner = text or whole
    for given in ((whole, None), (whole, inner), (None, None), (None, inner)):
        assert "model_type" not in refusal(tmp_path / "good", architecture, *given), given
    for other in KNOWN:
        said = f"model_type '{other}' is another architecture's; {architecture} has"
        if other != whole:
            assert f"{said} {whole};" in refusal(tmp_path / "bad", architecture, other, inner)
        if other != inner:
            words = refusal(tmp_path / "bad", architecture, whole, other)
            assert f"text_config: {said} {inner};" in words
