"""A router's choice of experts, on CUDA."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import sigmoid


# lines of scores start anywhere, and alignment must not change the order of the softmax's sum
@triton.jit(do_not_specialize=["scores_len"], do_not_specialize_on_alignment=["scores"])
def _route(scores, bias, weights, ids, scores_len, scale, EXPERTS: tl.constexpr, LANES: tl.constexpr,
           TOP_K: tl.constexpr, SLOTS: tl.constexpr, SOFTMAX: tl.constexpr, BIASED: tl.constexpr,
           NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr):  # fmt: skip
    # Grid: tokens.
    # Tile: all experts of one token.
    # Traffic: T * E scores read, 2 * T * K words written.
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, LANES)
    open_ = expert < EXPERTS
    raw = tl.load(scores + token * scores_len + expert, mask=open_, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        share = tl.exp(raw - tl.max(raw, axis=0))
        share = share / tl.sum(share, axis=0)
    else:
        share = sigmoid(raw)
    choice = share
    if BIASED:
        choice += tl.load(bias + expert, mask=open_, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        open_ = open_ & _in_best_groups(choice, expert, EXPERTS // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, LANES)
    slot = tl.arange(0, SLOTS)
    chosen_ids = tl.zeros((SLOTS,), tl.int32)
    chosen_shares = tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    for k in tl.static_range(TOP_K):
        first = _first_best(choice, expert, open_, LANES)
        mine = tl.sum(tl.where(expert == first, share, 0.0), axis=0)
        chosen_ids = tl.where(slot == k, first, chosen_ids)
        chosen_shares = tl.where(slot == k, mine, chosen_shares)
        total += mine
        open_ = open_ & (expert != first)
    if RENORMALISE:
        chosen_shares = chosen_shares / (total + 1e-20)
    at = token * TOP_K + slot
    tl.store(weights + at, chosen_shares * scale, mask=slot < TOP_K)
    tl.store(ids + at, chosen_ids, mask=slot < TOP_K)


@triton.jit
def _first_best(value, index, open_, LANES: tl.constexpr):
    """The lowest index of those that are open with the highest value."""
    best = tl.max(tl.where(open_, value, float("-inf")), axis=0)
    return tl.min(tl.where(open_ & (value == best), index, LANES), axis=0)


@triton.jit
def _in_best_groups(choice, expert, GROUP_LEN: tl.constexpr, NUM_GROUPS: tl.constexpr,
                    TOP_GROUPS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Which experts are in the groups whose two best choices sum highest; ties to the lowest group."""
    group = expert // GROUP_LEN
    score = tl.full((LANES,), float("-inf"), tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        member = group == g
        first = _first_best(choice, expert, member, LANES)
        best = tl.max(tl.where(member, choice, float("-inf")), axis=0)
        second = tl.max(tl.where(member & (expert != first), choice, float("-inf")), axis=0)
        score = tl.where(member, best + second, score)
    inside = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        first = _first_best(score, expert, (group < NUM_GROUPS) & (inside == 0), LANES)
        inside = inside | (group == first // GROUP_LEN)
    return inside
