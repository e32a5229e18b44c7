"""Kernels of engines for GPUs, compiled without one."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from kit.kernels import uncompiled
from kit.overlap import too_early

pytest.importorskip("triton", reason="needs Triton")

from hemiola.builder import models
from hemiola.builder.build import build
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import export
from hemiola.builder.options import Options
from hemiola.builder.passes.fuse import fuse
from hemiola.builder.targets import kernels
from hemiola.plugins import OPS
from hemiola.plugins.gpu import compile
from hemiola.plugins.gpu.cover import calls_at, calls_of
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.launch import Call
from hemiola.plugins.gpu.sizes import Size
from hemiola.plugins.ranks import words_of
from hemiola.plugins.step import STEP_OPS, forms
from hemiola.plugins.sum.cuda import sum as sum_of_ranks
from hemiola.runtime import manifest
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import Limits

Get = Callable[..., Path]
GPUS = [name for name, arch in ARCHS.items() if arch.device == "cuda"]
FAMILIES = ("nemotron_h_moe", "qwen3_next")  # together they have every op
ON_GPUS = [name for name, op in OPS.items() if op.runs_on("cuda") and not op.exchanges]  # tests/plugins/sum
TWINS = ("sm_86", "sm_121")  # Triton and ptxas make of a kernel what they make for sm_80 and sm_120
LIMITS = Limits(max_len=4096, max_rows=40, max_step_tokens=700, num_drafts=3, page_len=32, chunk_len=16)


@pytest.fixture(scope="session")
def nodes(tiny_checkpoint: Get) -> list[kernels.Node]:
    """Every call of our ops in the two families."""
    return nodes_in(torch.bfloat16, tiny_checkpoint)


@cache
def nodes_in(dtype: torch.dtype, tiny_checkpoint: Get) -> list[kernels.Node]:
    found: set[kernels.Node] = set()
    for family in FAMILIES:
        checkpoint = Checkpoint(tiny_checkpoint(family))
        model = models.load(
            checkpoint,
            torch.ops.hemiola,
            chunk_len=16,
            max_len=LIMITS.max_len,
            dtype=dtype,
            tells_best=True,
        )
        for name, segment in (("trunk", model.trunk), ("draft", model.draft)):
            assert segment is not None
            graph = export(model, name, LIMITS)
            fuse(graph, model.weights(segment), "cuda")
            found |= set(kernels.nodes_of(graph))
    assert {node.op for node in found} == set(ON_GPUS)
    return sorted(found, key=repr)


@cache
def covered(node: kernels.Node, capability: int) -> set[Call]:
    return calls_of(OPS[node.op], node.arguments, node.most(LIMITS), Gpu(capability, 132))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("op", ON_GPUS)
def test_whatever_a_step_is_like_its_kernels_are_among_those_compiled(
    op: str, capability: int, nodes: list[kernels.Node]
) -> None:
    """Of any size, on any GPU of the architecture."""
    rng = random.Random(op)
    launcher = OPS[op].bind("cuda", ())
    for node in (node for node in nodes if node.op == op):
        most = node.most(LIMITS)
        for _ in range(40):
            size = Size(*(min(int(2 ** rng.uniform(0, 11)), limit) for limit in most))
            made = calls_at(launcher, Gpu(capability, rng.randrange(20, 200)), *node.arguments(size))
            assert made <= covered(node, capability), size


@pytest.mark.parametrize("width", [8, 600, 4096])
def test_whatever_a_plan_is_like_the_kernels_around_the_trunk_are_compiled(width: int) -> None:
    """Of any size, none of an item among them."""
    rng, gpu, op = random.Random(width), Gpu(90, 132), forms("cuda")
    compiled = kernels.calls_between(gpu, LIMITS, torch.empty(2, width, dtype=torch.bfloat16, device="meta"))

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for _ in range(40):
        num_rows, num_slots, ids_len, ring_len = (int(2 ** rng.uniform(0, 11)) for _ in range(4))
        tokens, lines, pairs, drafting = (rng.choice([0, 1, int(2 ** rng.uniform(0, 13))]) for _ in range(4))
        most, number = rng.randint(0, LIMITS.num_drafts), rng.randint(0, LIMITS.num_drafts)
        plan, rows, ids = made(num_rows + 1, 10), made(num_rows, 8), made(num_slots, ids_len)
        lengths, chosen = made(4, num_slots, dtype=torch.int64), made(lines, dtype=torch.int64)
        hidden, ring = (made(*s, width, dtype=torch.bfloat16) for s in ((tokens,), (num_slots, ring_len)))
        answers, most_lines = made(num_rows, 20, dtype=torch.int64), 1 + most
        accepted = plan, chosen, made(lines, dtype=torch.float32), lengths, ids, answers, most_lines, 16
        launched = calls_at(op.change, gpu, made(tokens, 2, dtype=torch.int64), ids)
        launched |= calls_at(op.fill, gpu, plan, ids, lengths, ids, tokens, lines)
        launched |= calls_at(op.accept, gpu, *accepted)
        launched |= calls_at(op.look_up, gpu, plan, lengths, ids, 1, rng.randint(1, 64))
        launched |= calls_at(op.first_pairs, gpu, plan, rows, hidden, ring, lengths, ids, pairs, drafting)
        launched |= calls_at(op.keep, gpu, rows, lengths, hidden, ring)
        launched |= calls_at(op.write, gpu, plan, chosen, lengths, ids, number)
        launched |= calls_at(op.next_pairs, gpu, plan, lengths, ids, number, drafting)
        launched |= calls_at(op.tell, gpu, plan, lengths, ids, answers, most_lines, most)
        assert launched <= compiled, launched - compiled


def entries(nodes: list[kernels.Node], capability: int) -> list[Call]:
    """One call of every kernel, and of each way in which a dense layer ends."""
    gpu = Gpu(capability, 132)
    x = torch.empty(2, 64, dtype=torch.bfloat16, device="meta")
    calls = kernels.calls_between(gpu, LIMITS, x, tp=2)
    calls |= calls_at(sum_of_ranks, gpu, x, torch.empty(words_of(2), dtype=torch.int64, device="meta"))
    for node in nodes:
        calls |= covered(node, capability)
    found: dict[tuple, Call] = {}
    for call in sorted(calls, key=lambda call: (len(repr(call)), repr(call))):
        found.setdefault((call.kernel, dict(call.constants).get("ACTIVATION")), call)
    return list(found.values())


@pytest.mark.parametrize("arch", GPUS)
def test_every_kernel_is_compiled_for_every_architecture(arch: str, nodes: list[kernels.Node]) -> None:
    major, minor = ARCHS[arch].capability or (0, 0)
    capability = 10 * major + minor
    calls = entries(nodes, capability)
    if arch in TWINS:
        calls = calls[::3]
    own = {op.name for op in OPS.values() if not op.ending and find_spec(f"hemiola.plugins.{op.name}.triton")}
    around = {op.name for op in STEP_OPS.values() if find_spec(f"hemiola.plugins.{op.name}.triton")}
    between = {"gpu.clock"} | around
    assert {call.kernel.rpartition(".")[0] for call in calls} == own | between or arch in TWINS
    with ThreadPoolExecutor(2) as pool:
        made = [*pool.map(lambda call: compile.compile_call(call, capability), calls)]
    for compiled in made:
        assert compiled.cubin[:4] == b"\x7fELF" and compiled.binary.symbol.encode() in compiled.cubin
        assert f".target sm_{capability}" in compiled.ptx
        assert len(compiled.binary.maps) == sum(k.startswith("<") for k in compiled.binary.call.kinds)
        assert compiled.binary.waits == (capability >= 90)
    assert too_early(*made) == []


def over_narrow_pages(tiny_checkpoint: Get, kv_dtype: str) -> kernels.Node:
    """Attention whose pages are narrow."""
    checkpoint = Checkpoint(tiny_checkpoint("qwen3_5"))
    sizes = {"chunk_len": 16, "max_len": LIMITS.max_len, "dtype": torch.bfloat16}
    model = models.load(checkpoint, torch.ops.hemiola, **sizes, kv_dtype=kv_dtype)
    (node,) = (n for n in kernels.nodes_of(export(model, "trunk", LIMITS)) if n.op == "attention")
    return node


@pytest.mark.parametrize(
    ("arch", "codes"),
    [("sm_80", "turboquant_4bit_nc"), ("sm_90", "turboquant_3bit_nc"), ("sm_121", "turboquant_k8v4")],
)
def test_attention_over_codes_is_compiled_where_it_is_offered(
    arch: str, codes: str, tiny_checkpoint: Get
) -> None:
    capability = 10 * ARCHS[arch].capability[0] + ARCHS[arch].capability[1]
    node = over_narrow_pages(tiny_checkpoint, codes)
    calls = {call.kernel: call for call in sorted(covered(node, capability), key=repr)}
    assert {name.rpartition(".")[2] for name in calls} == {"_write", "_attend", "_join", "pack"}
    for call in calls.values():
        assert compile.compile_call(call, capability).cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", GPUS[2:])
def test_attention_over_pages_of_e4m3_is_compiled_where_it_is_offered(
    arch: str, tiny_checkpoint: Get
) -> None:
    """From sm_89 on; older ones are refused (tests/builder/test_build.py)."""
    capability = 10 * ARCHS[arch].capability[0] + ARCHS[arch].capability[1]
    node = over_narrow_pages(tiny_checkpoint, "fp8")
    calls = {call.kernel: call for call in sorted(covered(node, capability), key=repr)}
    assert {name.rpartition(".")[2] for name in calls} == {"_write", "_attend", "_join"}
    for call in calls.values():
        assert ("fp8e4nv" in repr(call)) == (not call.kernel.endswith("_join"))
        assert compile.compile_call(call, capability).cubin[:4] == b"\x7fELF"


def attention_of(
    size: Size, depth: int = 256, page_len: int = 64, dtype: torch.dtype = torch.bfloat16
) -> list:
    """Arguments of a layer of the 9B's kind."""

    def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide, pages = made(size.tokens, 24 * depth), [made(9, page_len, 4, depth) for _ in range(2)]
    tokens = (part.unflatten(1, (-1, depth)) for part in wide.split([16 * depth, 4 * depth, 4 * depth], 1))
    ints = (made(*s, dtype=torch.int32) for s in ((size.rows, size.pages), (size.rows, 8), (size.tokens,)))
    return [*tokens, *pages, *ints, 0.1, 0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("capability", "other"),
    [
        (90, {}),
        (80, {}),
        (120, {}),
        (90, {"page_len": 32}),
        (90, {"dtype": torch.float32}),
        (90, {"depth": 64}),
    ],
    ids=["sm_90", "sm_80", "sm_120", "pages of 32", "fp32", "depth 64"],
)
def test_prompts_have_a_kernel_of_their_own_on_sm_90(capability: int, other: dict) -> None:
    """Whatever a step is like, it is among those compiled; it waits for kernels before it."""
    rng, most = random.Random(0), Size(700, 40, 64)
    calls = calls_of(OPS["attention"], lambda size: attention_of(size, **other), most, Gpu(capability, 132))
    launcher = import_module("hemiola.plugins.attention.cuda").attention
    for _ in range(200):
        size = Size(*(min(int(2 ** rng.uniform(0, 11)), limit) for limit in most))
        gpu = Gpu(capability, rng.randrange(20, 200))
        assert calls_at(launcher, gpu, *attention_of(size, **other)) <= calls, size
    own = [call for call in calls if call.kernel == "attention._prompt"]
    assert bool(own) == (capability == 90 and not other)
    for call in own[:1]:
        compiled = compile.compile_call(call, capability)
        assert compiled.binary.threads == 12 * 32 and len(compiled.binary.maps) == 2
        assert too_early(compiled) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_products_of_an_engine_in_fp32_are_not_of_tf32(arch: str, tiny_checkpoint: Get) -> None:
    """Which is what Triton takes for fp32 unless told otherwise."""
    major, minor = ARCHS[arch].capability or (0, 0)
    calls: dict[str, Call] = {}
    for node in nodes_in(torch.float32, tiny_checkpoint):
        if OPS[node.op].folder in ("attention", "delta", "linear", "mamba2", "moe"):
            calls |= {call.kernel: call for call in covered(node, 10 * major + minor)}
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda call: compile.compile_call(call, 10 * major + minor), calls.values()))
    assert not [one.binary.call for one in made if "mma" in one.ptx or "tf32" in one.ptx]
    multiply = {one.binary.call.kernel for one in made if one.ptx.count("fma.rn.f32") >= 16}
    of_products = {"attention._attend", "delta._scan", "delta._step", "delta._weigh", "linear._tiles"}
    assert multiply >= of_products | {"mamba2._scan", "mamba2._step", "moe._experts"}


def test_an_engine_holds_the_kernels_of_all_its_architectures(tiny_checkpoint: Get, tmp_path: Path) -> None:
    with uncompiled():
        options = Options(arch=["sm_90,sm_80", "sm_90"], max_len=64, max_rows=2, max_step_tokens=32)
        build(tiny_checkpoint("qwen3_5"), tmp_path, options)
    found = manifest.load(tmp_path)
    assert found.arch == "sm_90,sm_80" and [kernels.arch for kernels in found.kernels] == ["sm_90", "sm_80"]
    for own in found.kernels:
        files = [entry.file for entry in own.binaries]
        assert len(set(files)) == len(files) > 10 and set(files) <= set(found.sha256)
        assert all(file.startswith(f"kernels/{own.arch}/") for file in files)
    some = tmp_path / found.kernels[1].binaries[0].file
    some.write_bytes(some.read_bytes()[:-1])
    with pytest.raises(Refused, match=r"\.cubin was changed after the build .*; run build-engine again"):
        manifest.load(tmp_path)


def test_an_engine_of_other_kernels_than_ours_is_refused(
    tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir = tiny_engine("qwen3_5", arch="sm_90")
    monkeypatch.setattr(manifest, "sources", lambda: "other")
    with pytest.raises(
        Refused, match="built from other kernels than this hemiola has; run build-engine again"
    ):
        manifest.load(engine_dir)


def test_what_cannot_be_compiled_is_refused_by_name(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(call: Call, capability: int) -> compile.Compiled:
        raise compile.TooLarge(f"{call.kernel} needs 9 bytes, sm_{capability} has 8")

    monkeypatch.setattr(compile, "compile_call", too_large)
    with pytest.raises(
        Refused, match=r"--arch sm_86: .* needs 9 bytes, sm_86 has 8; leave this architecture"
    ):
        build(tiny_checkpoint("qwen3_5"), tmp_path / "engine", Options(arch="sm_86", max_len=64))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(
        Refused, match=r"compiled by Triton, which is not here; run pip install -e '.*\[cuda\]'"
    ):
        build(tiny_checkpoint("qwen3_5"), tmp_path / "engine", Options(arch="sm_86", max_len=64))
    assert not (tmp_path / "engine").exists()


def test_triton_that_has_no_room_for_its_files_is_no_full_engine_directory(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(call: Call, capability: int) -> compile.Compiled:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile, "compile_call", full)
    options = Options(arch="sm_90", max_len=64, max_rows=2, drafts="none")
    with pytest.raises(Refused, match=r"--arch sm_90: Triton cannot compile \(.*No space.*; free space in /"):
        build(tiny_checkpoint("qwen3_5"), tmp_path / "engine", options)
    assert not [*tmp_path.iterdir()]


def test_no_thread_gives_the_others_their_line_numbers_back(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each switched them off and on again for all: a kernel here and there was three times as large."""
    seen = []
    with uncompiled(), monkeypatch.context() as patch:  # undone before `uncompiled` is
        named = compile.compile_call

        def look(call: Call, capability: int) -> object:
            seen.append(compile.knobs.compilation.disable_line_info)
            return named(call, capability)

        patch.setattr(compile, "compile_call", look)
        build(tiny_checkpoint("qwen3_5"), tmp_path / "engine", Options(arch="sm_90", max_len=64))
    assert all(seen) and len(seen) > 20 and not compile.knobs.compilation.disable_line_info


def test_looking_at_calls_is_no_silent_stage(tiny_checkpoint: Get, tmp_path: Path) -> None:
    """With many rows and layers it takes longer than compiling what it finds."""
    told: dict[str, list[tuple[int, int]]] = {}

    def report(stage: str, done: int, total: int) -> None:
        told.setdefault(stage, []).append((done, total))

    options = Options(arch="sm_80,sm_90", max_len=64, max_rows=2, drafts="none")
    with uncompiled():
        build(tiny_checkpoint("qwen3_5"), tmp_path / "engine", options, report)
    for arch in ("sm_80", "sm_90"):
        looked, compiled = told[f"calls for {arch}"], told[f"kernels for {arch}"]
        assert looked == [(done, looked[0][1]) for done in range(len(looked))] and len(looked) > 5
        assert looked[0][1] == len(looked) and compiled[-1] == (len(compiled), len(compiled))
    assert [*told].index("calls for sm_80") < [*told].index("kernels for sm_80")
