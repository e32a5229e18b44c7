"""What a program is bound to: forms, and weights as they lie in the file; what opening an engine costs."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.checkpoints import NEMOTRON_H, write_tokenizer

from hemiola.builder.build import Options, build
from hemiola.plugins import OPS
from hemiola.runtime import manifest
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.program import load_program
from hemiola.runtime.device.session import Session, bind_forms, load_weights
from hemiola.runtime.llm import LLM
from hemiola.runtime.manifest_parts import OpNode

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "benchmarks/configs/qwen3.5-0.8b/config.json"
DRAWN = {"num_hidden_layers": 4, "vocab_size": 4096, "eos_token_id": 0}
OPEN = """
import ctypes, gc, sys
from pathlib import Path
sys.path.insert(0, ".")
from hemiola.runtime.llm import LLM

def read(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def answer(engine_dir):
    with LLM(engine_dir, cache_bytes=2**25, prefix_cache=False) as llm:
        llm.generate([[5, 6, 7]])
        return sum(tensor.nbytes for tensor in llm._loop.storage.tensors.values())

small, large = sys.argv[1:3], sys.argv[3:]
for engine_dir in small:
    answer(engine_dir)  # the kernels of both families are compiled, modules are imported
for engine_dir in large:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    caches = answer(engine_dir)
    print(read("VmHWM") - before - caches)
assert "torch._dynamo" not in sys.modules, "it takes seconds of each start"
"""


def test_every_node_of_ours_calls_its_form_itself(tiny_engine: Callable[..., Path]) -> None:
    engine_dir = tiny_engine("qwen3_next")
    segment = manifest.load(engine_dir).segment("trunk")
    program = load_program(engine_dir / segment.file)
    ours = {op.torch_op: op.name for op in OPS.values()}
    before = [ours[node.target] for node in program.graph.nodes if node.target in ours]
    assert before == [node.op for node in segment.nodes] and len(before) > 20
    bind_forms(program, segment)
    assert not any(node.target in ours for node in program.graph.nodes)
    for nodes, error in ((segment.nodes[:-1], ValueError), (segment.nodes[::-1], AssertionError)):
        with pytest.raises(error):
            bind_forms(load_program(engine_dir / segment.file), segment.model_copy(update={"nodes": nodes}))


def test_a_form_gets_the_sizes_that_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import hemiola.plugins.linear.compiled as compiled

    monkeypatch.setattr(compiled, "linear", lambda *values: values)
    node = OpNode(op="linear", form="compiled", refused={}, sizes=(7,))
    assert OPS[node.op].bind(node.form, node.sizes)("x", "weight", "bias") == ("x", "weight", "bias", 7)
    assert OPS[node.op].bind(node.form, ()) is compiled.linear


def test_weights_are_mapped_as_they_lie_aligned_to_cache_lines(tiny_engine: Callable[..., Path]) -> None:
    engine_dir = tiny_engine("qwen3_5_tied")
    found = manifest.load(engine_dir)
    path = engine_dir / found.weights_file
    names = ["embed.weight", "layers.0.mixer.body.norm.weight"]
    weights = load_weights(engine_dir, found, names, torch.device("cpu"))
    assert [w.dtype for w in weights.values()] == [torch.bfloat16, torch.float32], "widened, or not packed"
    assert all(w.data_ptr() % 64 == 0 for w in weights.values())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    spans = [line.split()[0].split("-") for line in mapped]
    for weight in weights.values():
        assert any(int(a, 16) <= weight.data_ptr() < int(b, 16) for a, b in spans), "a copy, not the file"


def test_opening_an_engine_takes_its_weights_and_caches_and_no_more(
    tmp_path: Path, tiny_engine: Callable[..., Path]
) -> None:
    """By the peak memory of a process that opens tiny engines, then large ones, and answers with each."""
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn/config.json").write_text(json.dumps(json.loads(CONFIG.read_text()) | DRAWN))
    drawn = tmp_path / "drawn/engine"
    sizes = Options(random_weights=True, max_len=128, max_rows=2, drafts="none")
    expected = {drawn: build(tmp_path / "drawn", drawn, sizes).drawn_bytes}
    for dtype in (torch.bfloat16, torch.float32):
        engine_dir = large_engine(tmp_path / str(dtype), dtype)
        expected[engine_dir] = (engine_dir / "weights.safetensors").stat().st_size
    small = [tiny_engine(family, drafts="none") for family in ("nemotron_h_dense", "qwen3_5_tied")]
    command = [sys.executable, "-c", OPEN, *small, *expected]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for (engine_dir, weights), taken in zip(expected.items(), map(int, ended.stdout.split()), strict=True):
        least = 0.9 if engine_dir == drawn else 0.8  # lines of embeddings in a mapped file are not read
        assert weights > 100 * 2**20, engine_dir
        said = f"{taken >> 20} MiB for {weights >> 20}: {engine_dir}"
        assert least * weights < taken < 1.15 * weights, said


def large_engine(folder: Path, dtype: torch.dtype) -> Path:
    """Some 128 MiB of weights in MLPs and embeddings."""
    from safetensors.torch import save_file

    width, inner, vocab, layers = 1024, 6144 if dtype == torch.bfloat16 else 3072, 4096, "-" * 4
    config = NEMOTRON_H | {"hidden_size": width, "intermediate_size": inner, "vocab_size": vocab}
    config |= {"hybrid_override_pattern": f"{layers}*", "architectures": ["NemotronHForCausalLM"]}
    config |= {"num_nextn_predict_layers": 0, "max_position_embeddings": 256}
    shapes = {"backbone.embeddings.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    shapes |= {"backbone.norm_f.weight": (width,)}
    for n in range(len(layers) + 1):
        shapes[f"backbone.layers.{n}.norm.weight"] = (width,)
        mixer = {"up_proj": (inner, width), "down_proj": (width, inner)}
        if n == len(layers):
            mixer = {
                "q_proj": (64, width),
                "k_proj": (32, width),
                "v_proj": (32, width),
                "o_proj": (width, 64),
            }
        shapes |= {f"backbone.layers.{n}.mixer.{name}.weight": shape for name, shape in mixer.items()}
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(config))
    save_file(
        {n: torch.full(s, 0.01, dtype=dtype) for n, s in shapes.items()}, checkpoint / "model.safetensors"
    )
    write_tokenizer(checkpoint)
    build(checkpoint, folder / "engine", Options(max_len=128, max_rows=2, drafts="none"))
    return folder / "engine"


def test_a_forgotten_llm_ends_its_thread(tiny_engine: Callable[..., Path]) -> None:
    before = set(threading.enumerate())
    llm = LLM(tiny_engine("qwen3_5"), max_rows=1)
    (thread,) = [one for one in set(threading.enumerate()) - before if one.name == "hemiola-loop"]
    del llm
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize("drafts", ["none", "mtp"])
def test_a_segment_that_nobody_holds_waits_for_no_collector(
    tiny_engine: Callable[..., Path], drafts: str
) -> None:
    """On a GPU it held all of its memory until Python's collector came by."""
    engine_dir = tiny_engine("qwen3_5")
    found = manifest.load(engine_dir)
    session = Session(engine_dir, found, Storage(found.states, 4, 4), drafts)
    held = weakref.ref(session._trunk)
    gc.collect()
    gc.disable()
    try:
        del session
        assert held() is None
    finally:
        gc.enable()
