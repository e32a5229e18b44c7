"""The GPU's clock."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_times_are_written_where_they_belong_and_grow() -> None:
    from hemiola.plugins.gpu.clock.cuda import write_time

    times = torch.full((5,), -1, dtype=torch.int64, device="cuda")
    for at in (1, 3):
        write_time(times, at)
    first, second = times[1].item(), times[3].item()
    assert 0 < first <= second and times[[0, 2, 4]].tolist() == [-1, -1, -1]
