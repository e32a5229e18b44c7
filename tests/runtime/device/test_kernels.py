"""Loading an engine's kernels: what does not fit is refused in one line. The driver is a double."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from kit import checkpoints
from kit.gpu_double import DEVICE, FakeDriver
from kit.kernels import Replay

from hemiola.plugins import OPS, gpu
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.launch import Kernel
from hemiola.plugins.norm import cuda as norm
from hemiola.plugins.step import STEP_OPS
from hemiola.runtime import manifest
from hemiola.runtime.device import kernels
from hemiola.runtime.errors import Refused

Get = Callable[..., Path]


FORMS = [(op, form) for op in (*OPS.values(), *STEP_OPS.values()) for form in op.forms]
NAMES = (*(f"{op.folder}.{form.name}" for op, form in FORMS if form.device == "cuda"), "gpu.clock.cuda")


def every_kernel() -> list[Kernel]:
    modules = [import_module(f"hemiola.plugins.{name}") for name in NAMES]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Kernel)]


def test_every_kernel_is_found_by_its_name() -> None:
    for kernel in every_kernel():
        assert kernels._kernel(Path("engine"), kernel.name) is kernel


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tiny_engine: Get) -> Callable[[ModuleType | None], Path]:
    """Loads the kernels of an engine for two architectures on the second of them."""

    def run(driver: ModuleType | None) -> Path:
        engine_dir = tiny_engine("qwen3_5", arch="sm_80,sm_90")
        monkeypatch.setattr(kernels, "arch_here", lambda: "sm_90")
        monkeypatch.setitem(sys.modules, "hemiola.plugins.gpu.driver", driver)
        monkeypatch.setattr(gpu, "driver", driver, raising=False)
        if driver is None:
            monkeypatch.delattr(gpu, "driver")
        for kernel in every_kernel():
            monkeypatch.setattr(kernel, "binaries", {})
        kernels.load_kernels(engine_dir, manifest.load(engine_dir), DEVICE)
        return engine_dir

    return run


def test_all_kernels_of_the_gpu_that_is_here_and_no_others_are_loaded(load: Callable) -> None:
    driver = FakeDriver()
    found = manifest.load(load(driver))
    (mine,) = [own for own in found.kernels if own.arch == "sm_90"]
    assert driver.loaded == [entry.binary.call for entry in mine.binaries]
    assert list(norm._norm.binaries) == [call for call in driver.loaded if call.kernel == "norm._norm"]


def test_a_driver_older_than_the_engines_kernels_is_refused(load: Callable) -> None:
    with pytest.raises(
        Refused, match=r"has kernels of CUDA 12\.\d, the driver here knows 11\.8; install a newer driver"
    ):
        load(FakeDriver((11, 8)))


def test_without_cuda_python_an_engine_for_a_gpu_is_refused(load: Callable) -> None:
    with pytest.raises(
        Refused, match=r"through cuda-bindings, which is not here .*pip install -e '.*\[cuda\]'"
    ):
        load(None)


def test_a_binary_that_the_driver_does_not_take_is_refused(
    load: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"")
    with pytest.raises(
        Refused,
        match=r"kernels/sm_90/.*\.cubin cannot be loaded \(cuLibraryLoadData: .*\); run build-engine again",
    ):
        load(FakeDriver())


@pytest.mark.parametrize(
    ("family", "built"),
    [
        *((family, {}) for family in checkpoints.FAMILIES | checkpoints.TEST_FAMILIES),
        *((family, {"dtype": "float32"}) for family in ("nemotron_h_moe", "qwen3_next")),  # every op
        *(("qwen3_5", {"kv_dtype": "fp8", "dtype": dtype}) for dtype in ("bfloat16", "float32")),
    ],
    ids=str,
)
def test_an_engine_has_every_kernel_that_its_steps_launch(
    tiny_engine: Get, family: str, built: dict[str, str]
) -> None:
    """A step of one token had none where a layer looks at a part of a projection in another shape: in such a
    view of one token torch forgets how far the next would be, and kernels are told."""
    options = {"arch": "sm_90", "max_rows": 3, "max_step_tokens": 64}
    replay = Replay(tiny_engine(family, **options, **built), Gpu(90, 132))
    assert (replay.manifest.arch, [k.arch for k in replay.manifest.kernels]) == ("sm_90", ["sm_90"])
    for tokens, rows, logits in ((1, 1, 1), (2, 1, 1), (2, 2, 2), (5, 2, 5), (3, 3, 3), (64, 3, 12)):
        assert not replay.missing(tokens, rows, logits), f"{tokens} tokens of {rows} rows"


@pytest.mark.parametrize(
    "name",
    [
        "norm.norm",
        "norm.torch",
        "norm.__doc__",
        "lost._norm",
        "..os.system",
        "norm",
        "",
        "norm._norm()",
        "x" * 999,
    ],
)
def test_a_binary_of_what_is_no_kernel_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(Refused, match=r"^engine has a binary of .*, which is no kernel; run"):
        kernels._kernel(Path("engine"), name)
    assert kernels._kernel(Path("engine"), "norm._norm") is norm._norm
