"""Page-locked memory without a GPU: who has a block, and when it is lent again."""

import gc
import mmap
import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kit.gpu_double import Copying

from hemiola.runtime.device import transfer
from hemiola.runtime.device.pinned import Pinned


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Copying:
    double = Copying()
    monkeypatch.setattr(torch, "cuda", double.cuda)
    return double


@pytest.fixture
def pool(device: Copying) -> Pinned:
    return Pinned()


def lent(pool: Pinned, num_bytes: int = 100) -> torch.Tensor:
    with pool.lend(num_bytes) as numbers:
        assert numbers.dtype is torch.uint8 and numbers.shape == (num_bytes,)
    return numbers


def test_a_block_is_not_lent_again_before_its_copies_are_done(device: Copying, pool: Pinned) -> None:
    first = lent(pool).data_ptr()
    second = lent(pool, 4000).data_ptr()
    assert first != second and device.locked == {first, second}
    device.finish()
    assert {lent(pool).data_ptr(), lent(pool).data_ptr()} == {first, second} == device.locked
    assert lent(pool).data_ptr() not in (first, second)
    device.num_done -= 2
    device.finish()
    assert lent(pool, mmap.PAGESIZE + 1).data_ptr() not in (first, second)  # of another size


VIEWS: list[Callable[[torch.Tensor], object]] = [
    lambda numbers: numbers,
    lambda numbers: numbers[8:24].view(torch.int64)[1:],
    lambda numbers: numbers[3:].numpy()[5:],
    lambda numbers: numbers.untyped_storage(),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_block_is_not_lent_again_while_somebody_sees_it(
    device: Copying, pool: Pinned, view: Callable[[torch.Tensor], object]
) -> None:
    numbers = lent(pool)
    address, seen = numbers.data_ptr(), view(numbers)
    del numbers
    device.finish()
    gc.collect()
    assert lent(pool).data_ptr() != address
    del seen
    device.finish()
    assert address in (lent(pool).data_ptr(), lent(pool).data_ptr())


@pytest.mark.parametrize("when", ["copying", "behind"])
def test_what_could_not_be_copied_is_lent_to_nobody(device: Copying, pool: Pinned, when: str) -> None:
    """A copy may be under way all the same."""
    with pytest.raises(RuntimeError), pool.lend(100) as numbers:
        address = numbers.data_ptr()
        if when == "copying":
            raise RuntimeError("no")
        device.error = 700
    del numbers
    device.error = 0
    device.finish()
    assert {lent(pool).data_ptr() for _ in range(5)}.isdisjoint({address})
    device.finish()
    pool.give_back()
    assert device.locked == {address}


def test_nothing_is_raised_where_a_tensor_dies_on_a_lost_device(
    device: Copying, pool: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    asked = []
    held, told = [lent(pool) for _ in range(3)], lent(pool)
    device.error = 710
    device.check = lambda: asked.append("CUDA")
    held.clear()
    del told
    gc.collect()
    assert not raised and not asked
    del device.check
    with pytest.raises(RuntimeError, match="CUDA error: 710"):
        lent(pool)
    with pytest.raises(RuntimeError, match=r"16384 bytes of the host cannot .*CUDA error: number 710"):
        lent(pool, 16000)
    assert len(device.locked) == 4


def test_what_is_given_back_is_what_nobody_has(device: Copying, pool: Pinned) -> None:
    held = lent(pool)
    lent(pool, 9000)
    device.finish()
    under_way = lent(pool).data_ptr()
    pool.give_back()
    assert device.locked == {held.data_ptr(), under_way}
    device.finish()
    del held
    pool.give_back()
    assert not device.locked and not pool._blocks
    assert lent(pool).data_ptr() in device.locked


def test_threads_never_share_a_block(device: Copying, pool: Pinned) -> None:
    wrong: list[object] = []

    def work(own: int) -> None:
        rng, kept = random.Random(own), []
        for turn in range(400):
            with pool.lend(rng.choice((9, 5000))) as numbers:
                numbers.fill_(own)
            kept.append(numbers[2:7])
            if turn % 3 == 0:
                device.num_done = 2**60
            if len(kept) > 5:
                seen = kept.pop(rng.randrange(5))
                wrong.extend([own] if not (seen == own).all() else [])

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(device.locked) < 100


class There(torch.Tensor):
    """Lies on a GPU, it says."""

    is_cuda = True


@pytest.mark.parametrize(("with_command", "num_blocks"), [(0, 2), (2**16, 1)])
def test_what_goes_over_and_comes_back_is_what_was_given(
    device: Copying, pool: Pinned, monkeypatch: pytest.MonkeyPatch, with_command: int, num_blocks: int
) -> None:
    """Each in one block, in which nothing else lies before the copies are done; what is small needs none to
    go over."""
    monkeypatch.setattr(transfer, "PINNED", pool)
    monkeypatch.setattr(transfer, "WITH_COMMAND", with_command)
    arrays = [np.arange(7, dtype=np.int32), np.zeros((0, 3)), np.arange(12).reshape(3, 4)[:, ::2]]
    there = torch.zeros(200, dtype=torch.uint8).as_subclass(There)
    transfer.send(arrays, there)
    shapes = [(array.shape, array.dtype) for array in arrays]
    sent = transfer.unpack(there, shapes)
    for array, tensor in zip(arrays, sent, strict=True):
        assert np.array_equal(tensor.numpy(), array)
    more = [torch.tensor([True, False]).as_subclass(There), torch.randn(3, 4).as_subclass(There)[:, :2]]
    fetched = transfer.fetch(sent + more)
    assert len(device.locked) == device.num_begun == num_blocks
    device.finish()
    assert transfer.fetch(sent)[0].data_ptr() != fetched[0].data_ptr()
    for tensor, here in zip(sent + more, fetched, strict=True):
        assert torch.equal(tensor, here) and here.dtype is tensor.dtype and type(here) is torch.Tensor
