"""The embedding of tokens, compiled: a line is gathered from the strips of a dense layer's weight."""

import torch

from hemiola.plugins.cpu.code import Case, Operand, code_of, complain, numbers, numel
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import LANES, get, get_half, get_int, put
from hemiola.plugins.sizes import ceil_div

BLOCK = 4  # tokens of an item of work


def embed(
    weight: Operand,  # [strips, F, lanes], as linear.compiled.pack makes it of [V, F]
    token_ids: Operand,  # [T] int32
    vocab_size: int,
) -> Operand:  # [T, F] fp32
    """See reference.py. Raises IndexError for an id that is not in the vocabulary."""
    code, num_tokens = code_of(token_ids), token_ids.shape[0]
    y = code.empty(num_tokens, weight.shape[1])
    fault = code.fault(Case(IndexError, "embed: id {0} in a vocabulary of {1}"))
    sizes = (num_tokens, *weight.shape[1:], weight.dtype == torch.bfloat16, vocab_size)
    where = (weight, numbers(token_ids), y, fault)
    code.call(_embed, ceil_div(num_tokens, BLOCK), numel(y) * 2.0, *sizes, *where)
    return y


@Kernel
def _embed(item, scratch, num_tokens, width, lanes, narrow, vocab_size, weight, token_ids, y, fault):
    """An item is BLOCK tokens."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        token = get_int(token_ids, t)
        if token < 0 or token >= vocab_size:
            complain(fault, 1, token, vocab_size)
            return
        lane = token % lanes
        if narrow == 1:  # lanes j and 16 + j lie side by side
            lane = lane % LANES * 2 + lane // LANES
        at = token // lanes * width * lanes + lane
        for i in range(width):
            value = get_half(weight, at + i * lanes) if narrow == 1 else get(weight, at + i * lanes)
            put(y, t * width + i, value)
