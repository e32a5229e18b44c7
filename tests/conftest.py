"""Tiny checkpoints and engines, made once per session; poison for memory that nobody may read."""

import fcntl
import gc
import hashlib
import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from kit import checkpoints, gpu_engines, quantised
from kit.engine_hand import DEVICE
from kit.kernels import uncompiled

from hemiola.builder.build import Options, build
from hemiola.plugins.cpu import team

torch.set_num_threads(1)  # the models are tiny, and threads that wait for a busy core cost minutes
_traces = logging.getLogger("torch.__trace")
_traces.handlers.clear()  # with one, a tenth of torch.export is to write its traces down, for nobody
_traces.addHandler = lambda hdlr: None  # as pytest does for each test
torch.fx.config.do_not_emit_stack_traces = True  # nor does anybody read where a node was traced
os.environ["COLUMNS"] = "80"  # of tables that commands print, also where the tests run in a narrow window
os.environ["no_proxy"] = os.environ["NO_PROXY"] = (
    "127.0.0.1,localhost"  # else tests ask one for their servers
)
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its threads would write about one test into the next

# A busy machine fails no example. Every run tries others, and its header has the seed that repeats them; but
# one that judges a change (CI=1, `make test`) takes those that a test's own text gives: see CONTRIBUTING.md.
settings.register_profile(
    "others",
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fixed", settings.get_profile("others"), derandomize=True, database=None)
settings.register_profile("fuzz", settings.get_profile("others"), max_examples=2000)
settings.load_profile("fixed" if os.environ.get("CI") else "others")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit("TEST_DEVICE=cuda: torch finds no CUDA device here", returncode=1)
    if config.option.hypothesis_seed is None:  # workers of xdist get that of their parent
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the files that wait for servers: meanwhile others compute.

    xdist cuts the list into as many parts as there are workers. Tests of one server stay together.
    """
    num = getattr(config, "workerinput", {}).get("workercount", 1)
    waits: dict[object, list[pytest.Item]] = {}
    rest: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("server"):
            fixtures = getattr(item, "fixturenames", ())
            waits.setdefault("server" if "server" in fixtures else item.path, []).append(item)
        else:
            rest.append(item)
    shares = [[item for group in list(waits.values())[n::num] for item in group] for n in range(num)]
    ordered: list[pytest.Item] = []
    for n, share in enumerate(shares):
        length = (len(items) - len(ordered)) // (num - n)
        more = max(0, length - len(share))
        ordered += share + rest[:more]
        del rest[:more]
    items[:] = ordered + rest


def pytest_report_header(config: pytest.Config) -> str:
    if settings.default.derandomize:
        return "property tests: the same examples in every run; `make fuzz` tries others"
    return f"to repeat the property tests: --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.fixture(autouse=True)
def own_random_numbers() -> None:
    """Those of a test that draws them without a seed: the same whatever ran before it in this process."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="module", autouse=True)
def garbage_is_looked_for_in_what_is_new() -> None:
    """Else a tenth of the time goes into looking through torch, transformers and sympy again and again."""
    gc.collect()
    gc.freeze()


# Small pages and steps, so that short texts cross their edges.
SMALL = {"max_len": 512, "max_rows": 8, "max_step_tokens": 256, "page_len": 32, "chunk_len": 16}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(key, name, who makes a Path) -> a folder of that name, which one worker makes for all of them."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"

    def get(key: tuple, name: str, make: Callable[[Path], object]) -> Path:
        folder = root / hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                with torch.random.fork_rng(devices=[]):  # a test draws the same, whoever makes it
                    make(folder / name)
                (folder / "made").touch()
        return folder / name

    return get


@pytest.fixture(scope="session")
def tiny_checkpoint(shared: Callable[..., Path]) -> Callable[[str], Path]:
    """family -> checkpoint folder (checkpoints.FAMILIES). Do not change it; copy it first.

    "recipe+family" is a quantised copy (kit.quantised.RECIPES).
    """

    def get(family: str) -> Path:
        recipe, _, source = family.rpartition("+")
        if recipe:
            return shared(("checkpoint", family), "quantised", partial(make_quantised, recipe, get(source)))
        if family in checkpoints.TEST_FAMILIES:
            import_module(f"kit.{family}")  # which makes it known
        return shared(("checkpoint", family), family, partial(checkpoints.make, family))

    return get


def make_quantised(recipe: str, source: Path, folder: Path) -> None:
    quantised.quantise(source, folder.parent, quantised.RECIPES[recipe])


@pytest.fixture(scope="session")
def tiny_engine(
    tmp_path_factory: pytest.TempPathFactory,
    shared: Callable[..., Path],
    tiny_checkpoint: Callable[[str], Path],
) -> Callable[..., Path]:
    """(family, **options of builder.build.Options) -> engine directory. Do not change it; copy it first."""

    def get(family: str, **options: object) -> Path:
        checkpoint, options = tiny_checkpoint(family), SMALL | options
        if DEVICE == "cuda":
            own = gpu_engines.Engines(gpu_engines.shared_folder(tmp_path_factory))
            return own.engine(checkpoint, **options)

        def make(engine_dir: Path) -> None:
            with uncompiled() if options.get("arch", "cpu") != "cpu" else nullcontext():
                build(checkpoint, engine_dir, Options(**options))

        return shared(("engine", family, sorted(options.items())), family, make)

    return get


@pytest.fixture(scope="session")
def poison() -> Callable[..., torch.Tensor]:
    """A tensor full of NaN (of the lowest value, if integers): who reads it before writing it shows."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(
            shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype
        )

    return make


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A team has as many threads as are asked for, also where the process may run on one core only."""
    monkeypatch.setattr(team, "_TEAM", None)
    monkeypatch.setattr(team, "quota", lambda: team.MOST_THREADS)
    yield
    if team._TEAM is not None:
        team._TEAM.end()


@pytest.fixture(params=[1, 2, 3, 4], ids="threads={}".format)
def threads(request: pytest.FixtureRequest, many_cores: None) -> Iterator[int]:
    """Runs the test with this many threads in torch's loops and GEMMs."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
