"""What opening an engine takes."""

import json
import subprocess
import sys
from pathlib import Path

from hemiola.builder.build import build
from hemiola.builder.options import Options

CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3.5-0.8b" / "config.json"
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "eos_token_id": 0,
}
LARGE = {"num_hidden_layers": 4, "vocab_size": 32_768, "eos_token_id": 0}
MEASURE = """
import sys
from pathlib import Path
from hemiola import LLM
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
def opened(folder):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the most from here on
    with LLM(folder, max_rows=1, prefix_cache=False, cache_bytes=2**26) as llm:
        llm.generate([[5, 6, 7]])
    return status("VmHWM") - before
opened(sys.argv[1])  # what is imported and compiled
print(opened(sys.argv[2]))
"""


def test_opening_takes_the_memory_of_the_weights_and_little_more(tmp_path: Path) -> None:
    """Caches take theirs when they are written."""
    sizes = {}
    for name, changed in {"small": SMALL, "large": LARGE}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(json.loads(CONFIG.read_text()) | changed))
        options = Options(random_weights=True, max_len=1024, drafts="none")
        sizes[name] = build(tmp_path / name, tmp_path / f"{name}.engine", options).drawn_bytes
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / f"{name}.engine") for name in sizes)]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert sizes["large"] > 2e8
    assert 0.9 * sizes["large"] < taken < 1.15 * sizes["large"], f"{taken / 1e6:.0f} MB"
