"""TensorRT's Python bindings without TensorRT: what scripts/tensorrt_wheels.py has fetched.

python tests/kit/tensorrt_bindings.py VERSION NAME...     prints the names that this version has not
"""

import ctypes
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2] / ".cache" / "tensorrt"
MISSING = "no bindings of TensorRT here; python scripts/tensorrt_wheels.py fetches them (50 MB)"


def load(version: str) -> Any:
    """The bindings as `tensorrt`; a process can load one version."""
    folder = ROOT / version
    for library in sorted(folder.glob("lib*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(folder))
    sys.modules["tensorrt"] = trt = import_module("tensorrt_bindings")
    sys.modules["tensorrt.plugin"] = import_module("tensorrt_bindings.plugin")
    return trt


def has(trt: Any, name: str) -> bool:
    for part in name.split("."):
        trt = sys.modules["tensorrt.plugin"] if part == "plugin" else getattr(trt, part, None)
    return trt is not None


if __name__ == "__main__":
    found = load(sys.argv[1])
    print("missing:" + "".join(f" {name}" for name in sys.argv[2:] if not has(found, name)))
