"""Options: defaults, bounds, and the reasons they are refused with."""

import pytest
from kit.refused import code_and_field, refused

from hemiola.runtime.config import ServeConfig, resolve, state_bytes
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import Manifest
from hemiola.runtime.outline import Limits, State

GIB = 2**30


def manifest(**changes: object) -> Manifest:
    limits = Limits(max_len=100, max_rows=4, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)
    values: dict[str, object] = dict(
        format=6, ops={}, kernels=(), builder_version="", torch_version="", architecture="X", layers=(),
        vocab_size=9, hidden_size=8, target="torch", promise="bits", arch="cpu", drafts="none",
        kv_dtype="auto", act_dtype="float32", eos_ids=(), limits=limits, weights_file="", drawn={},
        segments=(), sha256={},
        states=(
            State(name="k", kind="page", shape=(32, 8), dtype="float32"),
            State(name="s", kind="slot", shape=(10,), dtype="float32"),
        ),
    )  # fmt: skip
    return Manifest(**values | changes)


def test_auto_is_what_the_engine_was_built_for() -> None:
    found = resolve(ServeConfig(), manifest(), GIB)
    assert (found.max_len, found.max_rows, found.max_step_tokens) == (100, 4, 64)
    assert (found.num_pages, found.num_slots) == (2 * 4 * 4 + 1, 5 + 4 * 4), (
        "twice the rows, for what may come again"
    )
    off = resolve(ServeConfig(prefix_cache=False), manifest(), GIB)
    assert (off.num_pages, off.num_slots) == (4 * 4 + 1, 5)
    assert (found.page_len, found.chunk_len, found.num_drafts) == (32, 16, 0)


def test_an_engine_for_several_gpus_starts_as_one_for_a_gpu() -> None:
    for arch in ("sm_90", "sm_80,sm_90"):
        found = resolve(ServeConfig(), manifest(arch=arch), GIB)
        assert found.cuda_graphs and found.pipeline_depth == 1


def test_bytes_of_states() -> None:
    assert state_bytes(manifest().states, "page") == 1024 and state_bytes(manifest().states, "slot") == 40


def test_memory_bounds_the_pages() -> None:
    """Slots are paid first: 5 of 40 bytes. Then snapshots, from a quarter of the rest."""
    plain = {"prefix_cache": False}
    assert resolve(ServeConfig(cache_bytes=200 + 9 * 1024 + 1023, **plain), manifest(), GIB).num_pages == 9
    part = ServeConfig(memory_fraction=0.25, **plain)
    assert resolve(part, manifest(), 4 * (200 + 7 * 1024)).num_pages == 7
    assert resolve(ServeConfig(cache_bytes=GIB, **plain), manifest(), 0).num_pages == 17, (
        "no more than is used"
    )
    found = resolve(ServeConfig(cache_bytes=200 + 16 * 40 + 9 * 1024), manifest(), GIB)
    assert (found.num_slots, found.num_pages) == (5 + 16, 9)


def test_engines_without_pages_or_slots() -> None:
    no_pages = manifest(states=manifest().states[1:])
    assert resolve(ServeConfig(), no_pages, 1000).num_pages == 33
    with pytest.raises(Refused):
        resolve(ServeConfig(), no_pages, 300)
    assert resolve(ServeConfig(), manifest(states=manifest().states[:1]), GIB).num_slots == 5, "no snapshots"


REFUSED = [
    ({"max_len": 101}, "out_of_range", "max_len"),
    ({"max_len": 1}, "out_of_range", "max_len"),
    ({"prefix_cache": True, "max_len": 33}, "conflict", "prefix_cache"),
    ({"prefix_cache": 1}, "wrong_type", "prefix_cache"),
    ({"prefix_cache": False, "num_snapshots": 3}, "conflict", "num_snapshots"),
    ({"ngram_max": 10**9}, "out_of_range", "ngram_max"),
    ({"num_snapshots": 10**15}, "exhausted", "num_snapshots"),
    ({"num_snapshots": 0}, "out_of_range", "num_snapshots"),
    ({"snapshot_interval": 100}, "out_of_range", "snapshot_interval"),
    ({"pipeline_depth": 3}, "out_of_range", "pipeline_depth"),
    ({"cuda_graphs": True}, "conflict", "cuda_graphs"),
    ({"max_rows": 5}, "out_of_range", "max_rows"),
    ({"max_rows": 0}, "out_of_range", "max_rows"),
    ({"max_step_tokens": 65}, "out_of_range", "max_step_tokens"),
    ({"max_step_tokens": 3}, "conflict", "max_rows"),
    ({"num_pages": 4}, "exhausted", "num_pages"),
    ({"cache_bytes": 5000}, "exhausted", "cache_bytes"),
    ({"cache_bytes": -1}, "out_of_range", "cache_bytes"),
    ({"cache_bytes": 0}, "out_of_range", "cache_bytes"),
    ({"cache_bytes": 10}, "exhausted", "cache_bytes"),
    ({"num_pages": 9, "cache_bytes": 9999}, "conflict", "num_pages"),
]


@pytest.mark.parametrize(("options", "code", "field"), REFUSED)
def test_sizes_that_cannot_be_are_refused(options: dict, code: str, field: str) -> None:
    error = refused(lambda: resolve(ServeConfig(**options), manifest(), GIB))
    assert (error.code, error.field) == (code, field) and error.way_out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_rows": 5}, "max_rows is 5, the engine was built for 4; rebuild with --max-rows 5"),
        (
            {"max_step_tokens": 3},
            "max_rows is 4, max_step_tokens is 3: each row needs a token per step;"
            " lower max_rows or raise max_step_tokens",
        ),
        (
            {"cache_bytes": 10},
            "the cache may take 10 bytes, room for 0 pages, but one request of max_len=100 needs 5,"
            " including one for padding; raise num_pages, cache_bytes or memory_fraction, or lower max_len"
            " or max_rows",
        ),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_its_limit_and_the_way_out(
    options: dict, sentence: str
) -> None:
    assert str(refused(lambda: resolve(ServeConfig(**options), manifest(), GIB))) == sentence


BAD = [
    ({"max_row": 4}, "unknown", "max_row"),
    ({"max_rows": "4"}, "wrong_type", "max_rows"),
    ({"max_rows": 4.0}, "wrong_type", "max_rows"),
    ({"max_rows": True}, "wrong_type", "max_rows"),
    ({"memory_fraction": 1.5}, "out_of_range", "memory_fraction"),
]


@pytest.mark.parametrize(("options", "code", "field"), BAD)
def test_options_of_the_wrong_kind_are_refused(options: dict, code: str, field: str) -> None:
    assert code_and_field(lambda: ServeConfig(**options)) == (code, field)


@pytest.mark.parametrize(
    "options, built, message",
    [
        ({"drafts": "mtp"}, {"drafts": "ngram"}, "without an MTP head"),
        ({"drafts": "none", "num_drafts": 2}, {"drafts": "ngram"}, "drafts is none"),
        (
            {"num_drafts": 0},
            {"drafts": "mtp"},
            "num_drafts is 0; give at least 1, or drafts='none' to run without",
        ),
        ({"num_drafts": 4}, {"drafts": "ngram"}, "rebuild with --num-drafts 4"),
        ({"ngram_min": 4, "ngram_max": 2}, {"drafts": "ngram"}, "raise ngram_max"),
        ({"drafts": "eagle"}, {"drafts": "ngram"}, "drafts is 'eagle'"),
    ],
)
def test_drafts_that_the_engine_has_not(options: dict, built: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        resolve(ServeConfig(**options), manifest().model_copy(update=built), GIB)


def test_drafts_can_be_turned_off_and_down() -> None:
    built = manifest().model_copy(update={"drafts": "mtp"})
    assert resolve(ServeConfig(), built, GIB).num_drafts == 3
    assert resolve(ServeConfig(num_drafts=1), built, GIB).num_drafts == 1
    off = resolve(ServeConfig(drafts="none"), built, GIB)
    assert (off.drafts, off.num_drafts) == ("none", 0)


def test_tiers_for_an_engine_in_which_no_layer_attends_divide_by_zero() -> None:
    """A unit of theirs is a page's bytes."""
    state = State(name="s", kind="slot", shape=(10,), dtype="float32")
    config = ServeConfig(host_cache_bytes=GIB)
    with pytest.raises(Refused, match="no layer attends; leave it out") as caught:
        resolve(config, manifest(states=(state,)), GIB)
    assert (caught.value.code, caught.value.field) == ("unsupported", "host_cache_bytes")
