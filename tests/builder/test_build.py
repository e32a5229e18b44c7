"""build-engine: what it writes, and one line for everything that it refuses."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoints
from kit.harness import Harness
from kit.stages import without_stages
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing

from hemiola.builder import build, cli, place, same_bits
from hemiola.builder.hashes import hash_files
from hemiola.runtime import manifest, progress
from hemiola.runtime.cli import inspected
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import Limits

ROOT = Path(__file__).resolve().parents[2]
Get = Callable[..., Path]
SMALL = ["--max-len", "256", "--max-rows", "4", "--max-step-tokens", "64", "--page-len", "32"]

INTERRUPTED = """
import sys, typer
from pathlib import Path
from hemiola.builder.cli import ends_in_one_line
try:
    with ends_in_one_line(Path("e")):
        exec("import os; os.kill(os.getpid(), 2)")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """build-engine in this process: exit code, stdout, stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["build-engine", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, without_stages(out.err)

    return call


def test_engine_is_self_contained(tiny_checkpoint: Get, run: Callable, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_checkpoint("nemotron_h_dense"), tmp_path / "source")
    code, out, err = run(source, "--engine-dir", tmp_path / "deep" / "engine", *SMALL)
    assert (code, err) == (0, "")
    assert "3 mamba2, 2 mlp, 1 attention" in out and "mtp, 3 at most" in out
    shutil.rmtree(source)
    engine = (tmp_path / "deep" / "engine").rename(tmp_path / "moved")
    assert {str(p.relative_to(engine)) for p in engine.rglob("*") if p.is_file()} == {
        "manifest.json",
        "trunk.jsonl",
        "trunk.lines.jsonl",
        "draft.jsonl",
        "weights.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/chat_template.jinja",
    }
    assert not any((tmp_path / "deep").iterdir())
    found = manifest.load(engine)
    assert found.eos_ids == (0, 2) and found.layers == (
        "mamba2",
        "mlp",
        "mamba2",
        "attention",
        "mlp",
        "mamba2",
    )
    assert found.limits == Limits(
        max_len=256, max_rows=4, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16
    )
    ids = Tokenizer.from_file(str(engine / "tokenizer" / "tokenizer.json")).encode("def größe():\n").ids
    assert Harness(engine).run(ids).shape == (len(ids), found.vocab_size)


def test_help_and_module_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hemiola.builder"]
    result = subprocess.run(
        [*command, tmp_path / "no", "--engine-dir", tmp_path / "e"], cwd=ROOT, capture_output=True
    )
    assert (result.returncode, result.stdout) == (2, b"")
    assert without_stages(result.stderr.decode()).splitlines() == [
        f"error: {tmp_path / 'no'} is not a directory, and no name on the Hub (OWNER/MODEL); pass a Hugging"
        " Face checkpoint folder or such a name"
    ]


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "expected"),
    [
        (None, None, ("mtp", 3)),
        ("ngram", 8, ("ngram", 8)),
        ("none", None, ("none", 0)),
    ],
)
def test_drafts(drafts: str | None, num_drafts: int | None, expected: tuple, tiny_engine: Get) -> None:
    found = manifest.load(tiny_engine("qwen3_5", drafts=drafts, num_drafts=num_drafts))
    assert (found.drafts, found.limits.num_drafts) == expected
    weights = {name for segment in found.segments for name in segment.weights}
    assert any(name.startswith("mtp.") for name in weights) == (found.drafts == "mtp")
    assert [s.name for s in found.segments] == (["trunk", "draft"] if found.drafts == "mtp" else ["trunk"])
    rings = {s.name: s.shape[0] for s in found.states if s.kind == "slot"}
    assert rings["layers.0.k_records"] == 16 + expected[1] and rings["layers.0.conv"] == 16 + expected[1] + 3


def test_a_head_without_tensors_is_no_head_and_not_silently(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path
) -> None:
    """transformers drops mtp.* when it saves a model, and keeps the config's mtp_num_hidden_layers."""
    source = altered(
        tiny_checkpoint("qwen3_5"),
        tmp_path,
        lambda t: {n: w for n, w in t.items() if not n.startswith("mtp.")},
    )
    code, _, err = run(source, "--engine-dir", tmp_path / "engine", *SMALL)
    built = manifest.load(tmp_path / "engine")
    assert (code, built.drafts, built.limits.num_drafts) == (0, "none", 0)
    assert err == (
        f"warning: {source / 'config.json'} has mtp_num_hidden_layers = 1, but the checkpoint has no mtp.*"
        " tensors: this engine will not draft; get the whole checkpoint, or ask for --drafts ngram or"
        " --drafts none\n"
    )
    code, _, err = run(source, "--engine-dir", tmp_path / "engine", "--drafts", "none", *SMALL)
    assert (code, err) == (0, ""), "said although it was asked for"
    with pytest.raises(Refused, match=r"--drafts mtp: the checkpoint has no mtp"):
        build.build(source, tmp_path / "other", build.Options(max_len=64, max_rows=1, drafts="mtp"))


def test_shared_weights_are_stored_once_and_shards_are_joined(tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5_tied", tmp_path / "source", shards=3)
    engine = tmp_path / "engine"
    build.build(source, engine, build.Options(max_len=256, max_rows=2, page_len=32, drafts="none"))
    stored = load_file(engine / "weights.safetensors")
    assert "embed.weight" in stored and "head.weight" not in stored
    tokens = [*range(3, 60)]
    with torch.no_grad():
        expected = checkpoints.reference(source)(input_ids=torch.tensor([tokens])).logits[0]
    assert (Harness(engine).run(tokens) - expected).abs().max() < 1e-4


def test_an_old_engine_is_replaced_and_survives_a_failed_build(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, options = tmp_path / "engine", build.Options(max_len=64, max_rows=1, drafts="none")
    first = build.build(tiny_checkpoint("qwen3_5"), engine, options)
    second = build.build(tiny_checkpoint("nemotron_h_dense"), engine, options)
    assert manifest.load(engine).identity == second.identity != first.identity

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for break_it, error in ((broken, KeyboardInterrupt), (full, Refused)):
        monkeypatch.setattr(build, "write_weights", break_it)
        with pytest.raises(error):
            build.build(tiny_checkpoint("qwen3_5"), engine, options)
    assert manifest.load(engine).identity == second.identity
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_a_file_system_without_locks_takes_engines_and_keeps_what_others_may_be_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(found: int, how: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with place.fresh(tmp_path / "engine") as other, place.fresh(tmp_path / "engine"):
        assert other.is_dir(), "a build that lives is not abandoned"
    monkeypatch.setattr(place.fcntl, "flock", refuses)
    (tmp_path / ".engine.building-theirs").mkdir()
    with place.fresh(tmp_path / "engine") as folder:
        (folder / "file").touch()
    assert (tmp_path / "engine" / "file").exists() and (tmp_path / ".engine.building-theirs").exists()


@pytest.mark.parametrize(
    "stored",
    [
        "{{ messages }}",
        [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ messages }}"}],
    ],
)
def test_a_template_inside_the_tokenizer_config_is_found(
    stored: object, tiny_checkpoint: Get, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "source")
    (source / "chat_template.jinja").unlink()
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    build.build(source, tmp_path / "engine", build.Options(max_len=64, max_rows=1, drafts="none"))
    assert (tmp_path / "engine" / "tokenizer" / "chat_template.jinja").read_text() == "{{ messages }}"


# ---- bad input: what is done to a good checkpoint, or said beside one, and words that the one line must have


def altered(source: Path, tmp_path: Path, change: Callable[[dict], dict]) -> Path:
    folder = shutil.copytree(source, tmp_path / "changed")
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        kept = {key: value for key, value in (content | changes).items() if value != "REMOVED"}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors") | {
            name.replace("__", "."): t for name, t in changes.items()
        }
        save_file({name: t for name, t in stored.items() if t is not None}, folder / "model.safetensors")

    return change


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def absent_shard(folder: Path) -> None:
    checkpoints.write_tensors(folder, load_file(folder / "model.safetensors"), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)


def ids_around(last: int) -> Callable[[Path], None]:
    """Of each text, where all texts were refused when they came."""

    def put_(folder: Path) -> None:
        path = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        tokenizer.post_processor = BertProcessing(("<e>", last), ("<b>", 0))
        tokenizer.save(path)

    return put_


def tokenizer_with(token: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        tokenizer.add_tokens([token])
        tokenizer.save(path)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


QWEN, NEMOTRON, MOE = "qwen3_5", "nemotron_h_dense", "nemotron_h_moe"
SPOILED = {
    "no config": (QWEN, remove("config.json"), "has no config.json"),
    "config is not json": (QWEN, write("config.json", "{"), "config.json cannot be read as JSON (Expecting"),
    "config is a list": (QWEN, write("config.json", "[]"), "config.json is not a JSON object"),
    "no weights": (QWEN, remove("model.safetensors"), "has no model.safetensors and no index"),
    "truncated": (QWEN, cut, "model.safetensors is not a complete safetensors file", "download it again"),
    "garbage": (QWEN, write("model.safetensors", "x" * 99), "model.safetensors is not a complete"),
    "absent shard": (QWEN, absent_shard, "model-00002-of-00003.safetensors is missing"),
    "tokenizer": (QWEN, write("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer"),
    "tokenizer config": (
        QWEN,
        write("tokenizer_config.json", "{"),
        "/source/tokenizer_config.json cannot be read as JSON",
    ),
    "tokenizer ids": (QWEN, tokenizer_with("extra"), "has ids up to 320, but vocab_size is 320"),
    "ids around texts": (QWEN, ids_around(320), "has ids up to 320, but vocab_size is 320"),
    "missing tensor": (QWEN, tensors(model__norm__weight=None), "has no tensor model.norm.weight"),
    "extra tensor": (QWEN, tensors(model__what__ever=torch.zeros(1)), "does not know: model.what.ever"),
    "extra nemotron tensor": (
        NEMOTRON,
        tensors(backbone__layers__0__mixer__what=torch.zeros(1), rotary_emb__inv_freq=torch.zeros(1)),
        "NemotronHForCausalLM does not know: backbone.layers.0.mixer.what, rotary_emb.inv_freq;",
    ),
    "extra expert": (
        MOE,
        tensors(backbone__layers__1__mixer__experts__99__up_proj__weight=torch.zeros(1)),
        "NemotronHForCausalLM does not know: backbone.layers.1.mixer.experts.99.up_proj.weight;",
    ),
    "extra mtp tensor": (MOE, tensors(mtp__what=torch.zeros(1)), "does not know: mtp.what;"),
    "wrong shape": (
        QWEN,
        tensors(model__norm__weight=torch.zeros(63)),
        "model.norm.weight has shape [63]",
        "[64]",
    ),
    "nan": (
        QWEN,
        tensors(model__norm__weight=torch.tensor([1.0] * 63 + [torch.nan])),
        "model.safetensors: model.norm.weight holds NaN or infinity (1 of 64 values)",
    ),
    "infinity": (
        QWEN,
        tensors(model__norm__weight=torch.tensor([torch.inf, -torch.inf] + [1.0] * 62)),
        "model.norm.weight holds NaN or infinity (2 of 64 values)",
    ),
    "half an mtp head": (QWEN, tensors(mtp__fc__weight=None), "has no tensor mtp.fc.weight"),
    "architecture": (
        QWEN,
        config(architectures=["LlamaForCausalLM"]),
        "architecture LlamaForCausalLM is not",
        "NemotronHForCausalLM",
    ),
    "almost an architecture": (
        QWEN,
        config(architectures=["Qwen3_5ForCausalML"]),
        "Qwen3_5ForCausalML is not supported, the nearest that is: Qwen3_5ForCausalLM;",
    ),
    "model type": (
        QWEN,
        config(model_type="qwen3_6_text"),
        "config.json: model_type 'qwen3_6_text' is not supported, the nearest that is: qwen3_5_text;",
        "Qwen3_5ForCausalLM has qwen3_5_text",
    ),
    "model type like no other": (QWEN, config(model_type="gpt2"), "model_type 'gpt2' is not supported; "),
    "model type of another": (
        NEMOTRON,
        config(model_type="qwen3_next"),
        "model_type 'qwen3_next' is another architecture's; NemotronHForCausalLM has nemotron_h",
    ),
    "model type is a number": (NEMOTRON, config(model_type=3), "model_type is 3, expected str"),
    "text model type": (
        "qwen3_5_tied",
        config(text_config={"model_type": "qwen3_6_text", "max_position_embeddings": 1024}),
        "config.json: text_config: model_type 'qwen3_6_text' is not supported, the nearest",
    ),
    "no architecture": (QWEN, config(architectures="REMOVED"), "has no architectures"),
    "quantised": (
        QWEN,
        config(quantization_config={"quant_method": "fp8"}),
        "FP8 by its config",
        "no tensor is",
    ),
    "modelopt": (QWEN, write("hf_quant_config.json", "{}"), "hf_quant_config.json", "quantised"),
    "missing size": (QWEN, config(num_attention_heads="REMOVED"), "has no num_attention_heads"),
    "size is text": (QWEN, config(hidden_size="64"), "hidden_size is '64', expected int"),
    "size is zero": (QWEN, config(hidden_size=0), "hidden_size is 0, expected a positive number"),
    "head ratio": (
        QWEN,
        config(num_attention_heads=3, num_key_value_heads=2),
        "num_attention_heads 3 is not a multiple of num_key_value_heads 2",
    ),
    "delta ratio": (QWEN, config(linear_num_value_heads=5), "linear_num_value_heads 5 is not a multiple"),
    "hidden_act": (QWEN, config(hidden_act="gelu"), "hidden_act = 'gelu' is not supported, only 'silu'"),
    "bias": (QWEN, config(attention_bias=True), "attention_bias = True is not supported"),
    "output gate": (QWEN, config(output_gate_type="sigmoid"), "output_gate_type = 'sigmoid'"),
    "no output gate": (QWEN, config(attn_output_gate=False), "attn_output_gate = False"),
    "sliding window": (QWEN, config(use_sliding_window=True), "use_sliding_window = True"),
    "rope": (QWEN, config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_type = 'yarn'"),
    "old rope": (QWEN, config(rope_scaling={"type": "linear"}), "type = 'linear'"),
    "rotary part": (
        QWEN,
        config(rope_parameters={"partial_rotary_factor": 0.2}),
        "partial_rotary_factor 0.2 turns 3 of 16",
    ),
    "layer type": (
        QWEN,
        config(layer_types=["sliding_attention"] * 4),
        "layer_types has 'sliding_attention'",
    ),
    "layer count": (QWEN, config(num_hidden_layers=5), "layer_types has 4 entries, num_hidden_layers is 5"),
    "own mtp embeddings": (
        QWEN,
        config(mtp_use_dedicated_embeddings=True),
        "mtp_use_dedicated_embeddings = True",
    ),
    "two mtp layers": (QWEN, config(mtp_num_hidden_layers=2), "mtp_num_hidden_layers = 2"),
    "mamba act": (NEMOTRON, config(mamba_hidden_act="gelu"), "mamba_hidden_act = 'gelu'"),
    "mlp act": (NEMOTRON, config(mlp_hidden_act="silu"), "mlp_hidden_act = 'silu'"),
    "conv bias": (NEMOTRON, config(use_conv_bias=False), "use_conv_bias = False"),
    "mamba bias": (NEMOTRON, config(use_bias=True), "use_bias = True"),
    "window": (NEMOTRON, config(sliding_window=128), "sliding_window = 128"),
    "letter": (
        NEMOTRON,
        config(hybrid_override_pattern="M-M*XM"),
        "hybrid_override_pattern has 'X', known are M",
    ),
    "mtp letter": (NEMOTRON, config(mtp_hybrid_override_pattern="*M"), "the MTP pattern '*M'", "recurrent"),
    "word": (MOE, config(layers_block_type=["mamba", "rwkv"]), "layers_block_type has 'rwkv'"),
    "dt limits": (NEMOTRON, config(time_step_limit=[0.1, 0.0]), "time_step_limit is [0.1, 0.0]"),
    "expert groups": (MOE, config(n_group=4), "n_group 4"),
    "too many experts": (MOE, config(num_experts_per_tok=7), "num_experts_per_tok 7"),
    "mamba groups": (NEMOTRON, config(n_groups=4), "mamba_num_heads 6 is not a multiple of n_groups 4"),
}
OPTIONS = {
    "pages off the grid": ("--page-len 40", "--page-len 40 is not a multiple of --chunk-len 16"),
    "too long": ("--max-len 2000", "--max-len 2000 is more than max_position_embeddings", "1024"),
    "less than a page": ("--max-len 20", "--max-len 20 is less than one page of --page-len 64"),
    "drafts without count": ("--drafts mtp --num-drafts 0", "--num-drafts 0 with --drafts mtp"),
    "count without drafts": ("--drafts none --num-drafts 2", "--num-drafts 2 with --drafts none"),
    "negative drafts": ("--num-drafts -1", "--num-drafts is -1"),
    "no rows": ("--max-rows 0", "--max-rows is 0"),
    "no draft vocabulary": ("--draft-vocab 0", "--draft-vocab is 0"),
    "kind of pages": ("--kv-dtype fp4", "--kv-dtype is 'fp4'", "'auto', 'fp8', 'turboquant_k8v4'"),
    "narrow pages on GPUs": ("--kv-dtype fp8 --arch sm_80,sm_90,sm_86", "sm_80, sm_86 cannot convert e4m3"),
    "narrow pages in ONNX": ("--kv-dtype fp8 --target onnxruntime", "not supported by --target onnxruntime"),
    "codes in ONNX": (
        "--kv-dtype turboquant_4bit_nc --target onnxruntime",
        "--kv-dtype turboquant_4bit_nc is not supported by --target onnxruntime, only by torch",
    ),
    "e4m3 keys on GPUs": (
        "--kv-dtype turboquant_k8v4 --arch sm_80,sm_90",
        "--kv-dtype turboquant_k8v4: sm_80 cannot convert e4m3",
    ),
    "tiny steps": ("--max-step-tokens 9", "--max-step-tokens 9 cannot hold --max-rows 64", "256"),
    "a step that no machine holds": (
        "--max-step-tokens 4611686018427387904",
        "--max-step-tokens is 4611686018427387904; give at most 262144",
    ),
    "a step that no GPU holds": (
        "--max-step-tokens 262145 --arch sm_90",
        "--max-step-tokens is 262145; give at most 262144",
    ),
    "rows that no step holds": (
        "--max-rows 1000000000",
        "--max-rows is 1000000000; give at most 262144",
    ),
    "a way out that is refused, too": (
        "--max-rows 65537",
        "--max-rows 65537 with 3 drafts each are 262148 tokens in one step, at most 262144 can be",
        "use --max-rows 65536 at most, or fewer --num-drafts",
    ),
    "a row that no step holds": (
        "--max-rows 300 --num-drafts 1023",
        "--max-rows 300 with 1023 drafts each are 307200 tokens in one step",
        "use --max-rows 256 at most",
    ),
    "more drafts than a request has tokens": (
        "--num-drafts 99999999999999999999 --max-rows 1",
        "--num-drafts 99999999999999999999 is more than a request of --max-len 1024 can take",
        "use at most 1023",
    ),
    "rows that no graph on a GPU holds": (
        "--max-rows 1025 --max-step-tokens 5000 --arch sm_80,sm_90",
        "--max-rows 1025 is more than --arch sm_80,sm_90 can take in one step, which is 1024",
        "use at most 1024, and an engine on another GPU for more requests at once",
    ),
    "target": ("--target openvino", "--target openvino is not supported", "torch, onnxruntime, tensorrt"),
    "target for GPUs": (
        "--target tensorrt-rtx",
        "--target tensorrt-rtx is not for CPUs",
        "give --arch, one or more of sm_80, sm_86, sm_89, sm_120, sm_121",
    ),
    "target for one GPU": (
        "--target tensorrt",
        "--target tensorrt is not for CPUs; give --arch, one of sm_80, sm_86",
    ),
    "arch in capitals": (
        "--arch SM_90",
        "--arch SM_90 is not supported by --target torch, only cpu, sm_80",
        "is it sm_90?",
    ),
    "arch": ("--arch sm_70", "--arch sm_70 is not supported by --target torch, only cpu, sm_80"),
    "dtype of the CPU": (
        "--dtype bfloat16",
        "--dtype bfloat16 is not supported by --target torch --arch cpu, only float32; leave --dtype out",
    ),
    "dtype": ("--dtype float16", "--dtype is 'float16'", "'bfloat16' or 'float32'"),
    "no arch": ("--arch ,", "a name is empty; give cpu, or kinds of GPUs such as sm_89,sm_120"),
    "half an arch": ("--arch sm_90,", "--arch is 'sm_90,', where a name is empty"),
    "unknown option": ("--beam 4", "--beam", "--help"),
    "not a number": ("--max-len long", "--max-len is 'long'", "whole number"),
}


@pytest.mark.parametrize("case", SPOILED.values(), ids=[name.replace(" ", "-") for name in SPOILED])
def test_bad_checkpoint_is_one_line(case: tuple, tiny_checkpoint: Get, run: Callable, tmp_path: Path) -> None:
    family, spoil, *words = case
    source = shutil.copytree(tiny_checkpoint(family), tmp_path / "source")
    spoil(source)
    refused(run, source, tmp_path, [], words)


@pytest.mark.parametrize("case", OPTIONS.values(), ids=[name.replace(" ", "-") for name in OPTIONS])
def test_bad_option_is_one_line(case: tuple, tiny_checkpoint: Get, run: Callable, tmp_path: Path) -> None:
    options, *words = case
    refused(run, tiny_checkpoint(QWEN), tmp_path, options.split(), words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_drops_is_not_lost(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Imports and callbacks of C do."""

    def deaf(source: Path, engine_dir: Path, options: object, report: build.Report) -> None:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        report("checking", 0, 0)
        pytest.fail("the build goes on")

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(build, "build", deaf)
    said = f"interrupted; no engine was made, and {tmp_path} is as it was before\n"
    assert run(tmp_path, "--engine-dir", tmp_path) == (128 + number, "", said)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interrupt_within_exec_does_not_end_python_m_by_the_signal(tmp_path: Path) -> None:
    """Python forgets what status it was given where a plain KeyboardInterrupt came out of `exec`."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    paths = os.pathsep.join(map(str, (ROOT, tmp_path)))
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 130
    said = without_stages(done.stderr)
    assert said == "interrupted; no engine was made, and e is as it was before\n"


@pytest.mark.parametrize(
    ("stage", "shown"), [("writing weights", "4.0 KiB of 1.0 MiB"), ("trunk: kernels", "4096 of 1048576")]
)
def test_kernels_of_plugins_are_not_counted_in_bytes(stage: str, shown: str) -> None:
    assert progress.amount(stage, 4096, 1 << 20) == shown and progress.amount(stage, 0, 0) == ""


def test_an_empty_architecture_is_not_shown_as_a_tuple(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path
) -> None:
    code, _, err = run(tiny_checkpoint(QWEN), "--engine-dir", tmp_path / "engine", "--arch", "")
    assert code == 2 and err.startswith(
        "error: --arch is '', where a name is empty; give cpu, or kinds of GPUs"
    )


def test_an_empty_engine_directory_is_not_the_one_that_is_worked_in(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(tiny_checkpoint(QWEN), "--engine-dir", "")
    assert (code, err) == (2, "error: --engine-dir is empty; give a folder\n")
    assert not any(tmp_path.iterdir())


def refused(run: Callable, source: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    (tmp_path / "engines").mkdir()
    code, out, err = run(source, "--engine-dir", tmp_path / "engines" / "engine", *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert all(word in err for word in words), err
    assert ";" in err, f"no way out in: {err}"
    assert not any((tmp_path / "engines").iterdir())


def test_brackets_or_bytes_in_the_name_of_a_folder_end_a_command_with_a_traceback(
    tiny_engine: Get,
    run: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """An engine was made, and could not be shown: the ones are markup, the others no text."""
    monkeypatch.chdir(tmp_path)
    Path("[").mkdir()
    (engine := Path("[/red]")).symlink_to(tiny_engine("qwen3_5"))
    found = manifest.load(engine)
    monkeypatch.setattr(cli, "_build", lambda *_: found)
    code, out, err = run("source", "--engine-dir", engine)
    assert (code, err) == (0, "") and "[/red]" in out
    (other := Path("[/red]\udcff")).symlink_to(engine.absolute())
    assert run("source", "--engine-dir", other)[0] == 2  # before anything is made
    inspected.show(other, found, ServeConfig())
    assert "[/red]\ufffd" in capsys.readouterr().out


def test_a_change_in_any_file_of_an_engine_is_found(tiny_engine: Get, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine("qwen3_5"), tmp_path / "engine")
    files = {file for file in engine.rglob("*") if file.is_file() and file.name != manifest.FILE}
    assert engine / "tokenizer/chat_template.jinja" in files and len(files) == 7
    for file in files:
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(Refused, match=rf"{file} was changed after the build \(sha256"):
            manifest.load(engine)
        file.unlink()
        with pytest.raises(Refused, match=f"{file} is missing; run build-engine again"):
            manifest.load(engine)
        file.write_bytes(content)
    manifest.load(engine)
    (engine / "tokenizer/added_tokens.json").write_text("{}")
    with pytest.raises(Refused, match=r"added_tokens.json was not there when the engine was built"):
        manifest.load(engine)


def test_a_checkpoint_saved_again_behind_its_hash_has_the_bits_of_another(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--same-bits`, whose hash says who may take this engine's prefixes."""
    path = Path(shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "checkpoint"))

    def hashed(files: list[Path], *rest: Any) -> list[str]:
        found = list(hash_files(files, *rest))
        for file in path.glob("*.safetensors"):
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
        return found

    monkeypatch.setattr(same_bits, "hash_files", hashed)
    with pytest.raises(Refused, match="was changed during the build"):
        build.build(path, tmp_path / "engine", build.Options(same_bits=True, max_len=64))


def test_an_occupied_place_is_refused_and_left_alone(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    for taken, words in (
        (full, "has files but no engine"),
        (file, "is a file"),
        (file / "below", "cannot be written"),
    ):
        code, out, err = run(tiny_checkpoint(QWEN), "--engine-dir", taken, *SMALL)
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err and str(taken) in err
    assert (full / "thesis.txt").read_text() == file.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"full", "file"}
    code, _, err = run(tiny_checkpoint(QWEN))
    assert code == 2 and "--engine-dir" in err and err.count("\n") == 1


def test_a_file_beside_an_older_engine_is_not_removed(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path
) -> None:
    build_it = (tiny_checkpoint(QWEN), "--engine-dir", tmp_path / "engine", "--drafts", "none", *SMALL)
    assert run(*build_it)[0] == run(*build_it)[0] == 0
    (tmp_path / "engine/notes.txt").write_text("mine")
    code, _, err = run(*build_it)
    assert code == 2 and "beside it notes.txt, which a new engine would remove" in err
    assert (tmp_path / "engine/notes.txt").read_text() == "mine"


DAMAGED = [
    "",
    "7",
    "[]",
    "{}",
    '{"sha256": 7}',
    '{"sha256": null}',
    '{"sha256": [{}]}',
    '{"sha256": ["a.txt"]}',
    "[",
]


@pytest.mark.parametrize("content", [*DAMAGED, "[" * 10**5, None])
def test_an_old_engine_with_a_damaged_manifest_is_refused_or_replaced(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path, content: str | None
) -> None:
    """A number in place of its list of files was a traceback."""
    engine = tmp_path / "engine"
    engine.mkdir()
    if content is None:
        (engine / "manifest.json").symlink_to("/proc/self/mem")  # a regular file, which cannot be read
    else:
        (engine / "manifest.json").write_text(content)
    place.refuse_occupied(engine)  # nothing else is in it that could be lost
    (engine / "a.txt").write_text("mine")
    code, out, err = run(tiny_checkpoint(QWEN), "--engine-dir", engine, "--drafts", "none", *SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1) and "beside it a.txt" in err
    assert (engine / "a.txt").read_text() == "mine"


def test_an_old_engine_with_a_damaged_manifest_alone_is_replaced(
    tiny_checkpoint: Get, run: Callable, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "manifest.json").write_text('{"sha256": [[]]}')
    assert run(tiny_checkpoint(QWEN), "--engine-dir", engine, "--drafts", "none", *SMALL)[0] == 0
    assert manifest.load(engine)
