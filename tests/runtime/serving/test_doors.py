"""Every door says what the plain run says: ids, text, log-probabilities, bit for bit; after a reload, too."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from kit.doors import DOORS, OWN, PROMPTS, WAYS, Said, models_file, params, plain_run, shared
from kit.served import Served

pytestmark = pytest.mark.server

KEY = "SECRET"
NARROW = {  # codes of weights and of pages: every group, every kind of pages
    "qwen_fp8": "fp8",
    "modelopt_nvfp4": "turboquant_k8v4",
    "compressed_w4a16": "turboquant_4bit_nc",
    "compressed_int8": "turboquant_3bit_nc",
    "compressed_w4a16_asym": "turboquant_k3v4_nc",
}


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> list[Said]:
    found = plain_run(engine_dir)
    plain = plain_run(engine_dir, [params(shared(i)) for i in range(len(PROMPTS))])
    changed = {i % len(OWN) for i, one in enumerate(plain) if one.token_ids != found[i].token_ids}
    assert changed >= set(range(1, len(OWN) - 1)), "an option changes nothing here"
    return found


@pytest.fixture(scope="module")
def narrow_dirs(tiny_engine: Callable[..., Path]) -> dict[str, Path]:
    return {weights: tiny_engine(f"{weights}+qwen3_5", kv_dtype=pages) for weights, pages in NARROW.items()}


@pytest.fixture(scope="module")
def served(
    engine_dir: Path, narrow_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    models = {name: {"engine_dir": str(engine_dir), **own} for name, own in WAYS.items()}
    models |= {name: {"engine_dir": str(path), **WAYS["fast"]} for name, path in narrow_dirs.items()}
    file = models_file(tmp_path_factory.mktemp("doors"), models)
    # nine engines on two cores: one may get no processor for long
    running = Served(f"--models={file}", f"--control-key={KEY}", "--openai-port=0", "--hang-timeout=120")
    yield running
    assert running.end() == 0, running.said


def test_every_door_says_what_the_plain_run_says(served: Served, expected: list[Said]) -> None:
    """64 mixed prompts, with and without drafts and the prefix cache, which the second door finds warm."""
    assert len(PROMPTS) == 64 and len({one.text for one in expected}) > 40
    for model in WAYS:
        for door, ask in DOORS.items():
            assert ask(served, model) == expected, (model, door)


def test_codes_in_weights_and_pages_say_what_their_plain_run_says(
    served: Served, narrow_dirs: dict[str, Path], expected: list[Said]
) -> None:
    """Doors take turns."""
    plain = {name: plain_run(path) for name, path in narrow_dirs.items()}
    assert all(found != expected for found in plain.values())
    for (door, ask), name in zip(DOORS.items(), itertools.cycle(NARROW), strict=False):
        assert ask(served, name) == plain[name], (name, door)


def test_a_reloaded_engine_says_the_same_over_grpc_http_and_openai(
    served: Served, expected: list[Said]
) -> None:
    with grpcclient.InferenceServerClient(served.grpc_url) as control:
        control.unload_model("fast", headers={"triton-grpc-protocol-hemiola-key": KEY})
        control.load_model("fast", headers={"triton-grpc-protocol-hemiola-key": KEY})
    for door in ("Client.stream", "generate", "OpenAI"):
        assert DOORS[door](served, "fast") == expected, door
