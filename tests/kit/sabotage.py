"""A `hemiola serve` whose clocks jump, and whose engines raise within the step of a certain prompt."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
POISON = [7, 7, 13, 13, 7, 7]
JUMPS = """
import itertools, time
_jumps, _now = itertools.cycle([0, -7200, 86_400, -3 * 86_400, 3600]), time.time
time.time = lambda: _now() + next(_jumps)
"""
RAISES = f"""
from hemiola.runtime.schedule import loop
_launch = loop.Loop._launch

def launch(self, plan):
    if any(list(row.request.ids[:6]) == {POISON} for row in plan.rows):
        while len(plan.rows) == 1 and not len(self._inbox):  # somebody else shall be there
            time.sleep(0.01)
        raise ValueError("kernel on fire")
    return _launch(self, plan)

loop.Loop._launch = launch
"""


def sabotaged(folder: Path) -> list[str]:
    """The words of the command up to `serve`."""
    model = shutil.copytree(ROOT / "model_repo/hemiola", folder / "hemiola")
    with (model / "1/model.py").open("a") as file:
        file.write(JUMPS + RAISES)
    main = f"""{JUMPS}
from pathlib import Path
from hemiola.runtime.cli.main import main
from hemiola.runtime.serving import tritonserver
tritonserver.find_model_folder = lambda: Path({str(model)!r})
main()
"""
    return [sys.executable, "-c", main]
