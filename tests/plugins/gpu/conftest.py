"""The order of a kernel's programs, where kernels are interpreted."""

import pytest


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which a kernel's programs run: a GPU has none, so nobody may count on one."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx

    def backwards(*place: int) -> None:
        forwards(*(size - 1 - at for size, at in zip(builder.grid_dim, place, strict=True)))

    if request.param == "backwards":
        monkeypatch.setattr(builder, "set_grid_idx", backwards)
