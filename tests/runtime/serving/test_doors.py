"""Every door says what the plain run says: ids, text, log-probabilities, bit for bit; after a reload, too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from kit.doors import DOORS, OWN, PROMPTS, WAYS, Said, models_file, plain_run
from kit.served import Served

pytestmark = pytest.mark.server

KEY = "SECRET"


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> list[Said]:
    found, changed = plain_run(engine_dir)
    assert changed >= set(range(1, len(OWN) - 1)), "an option changes nothing here"
    return found


@pytest.fixture(scope="module")
def narrow_dir(tiny_engine: Callable[..., Path]) -> Path:
    """Weights and pages in 4 bits."""
    return tiny_engine("compressed_w4a16+qwen3_5", kv_dtype="turboquant_4bit_nc")


@pytest.fixture(scope="module")
def served(engine_dir: Path, narrow_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = {name: {"engine_dir": str(engine_dir), **own} for name, own in WAYS.items()}
    models["narrow"] = {"engine_dir": str(narrow_dir), **WAYS["fast"]}
    file = models_file(tmp_path_factory.mktemp("doors"), models)
    running = Served(f"--models={file}", f"--control-key={KEY}", "--openai-port=0")
    yield running
    assert running.end() == 0, running.said


def test_every_door_says_what_the_plain_run_says(served: Served, expected: list[Said]) -> None:
    """64 mixed prompts, with and without drafts and the prefix cache, which the second door finds warm."""
    assert len(PROMPTS) == 64 and len({one.text for one in expected}) > 40
    for model in WAYS:
        for door, ask in DOORS.items():
            assert ask(served, model) == expected, (model, door)


def test_codes_in_weights_and_pages_say_what_their_plain_run_says(
    served: Served, narrow_dir: Path, expected: list[Said]
) -> None:
    found, _ = plain_run(narrow_dir)
    assert found != expected
    for door, ask in DOORS.items():
        assert ask(served, "narrow") == found, door


def test_a_reloaded_engine_says_the_same_through_every_door(served: Served, expected: list[Said]) -> None:
    with grpcclient.InferenceServerClient(served.grpc_url) as control:
        control.unload_model("fast", headers={"triton-grpc-protocol-hemiola-key": KEY})
        control.load_model("fast", headers={"triton-grpc-protocol-hemiola-key": KEY})
    for door, ask in DOORS.items():
        assert ask(served, "fast") == expected, door
