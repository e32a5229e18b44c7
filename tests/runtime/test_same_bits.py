"""The file that names engines of the same bits comes from whoever built the engine."""

import json
from pathlib import Path

import pytest

from hemiola.runtime.errors import Refused
from hemiola.runtime.same_bits import FILE, load_same_bits

GOOD = {"bits": "0" * 64, "num_kv_parts": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 7},
        {"bits": "x"},
        {"num_kv_parts": 0},
        {"num_kv_parts": 3},
        {"num_kv_parts": "2"},
        {"more": 1},
    ],
)
def test_what_no_build_writes_is_refused_by_the_files_name(tmp_path: Path, wrong: dict[str, object]) -> None:
    (tmp_path / FILE).write_text(json.dumps(GOOD | wrong))
    with pytest.raises(Refused, match=f"{FILE} is not what a build writes for 4 ranks"):
        load_same_bits(tmp_path, {FILE: ""}, 4)


def test_an_engine_without_the_file_has_nothing_in_common(tmp_path: Path) -> None:
    assert load_same_bits(tmp_path, {}, 4) is None
    (tmp_path / FILE).write_text(json.dumps(GOOD))
    found = load_same_bits(tmp_path, {FILE: ""}, 4)
    assert found is not None and found.num_kv_parts == 2
