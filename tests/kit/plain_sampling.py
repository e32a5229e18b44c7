"""What changes logits before a token is chosen: the formulas of vLLM, one number at a time."""

import math

from hemiola.runtime.choose.rule import Rule


def edited(scores: list[float], own: Rule, history: list[int]) -> list[float]:
    params, output = own.params, history[own.prompt_len :]
    values = list(scores)
    for word in own.bad_words:
        *before, last = word
        if len(output) >= len(before) and output[len(output) - len(before) :] == before:
            values[last] = -math.inf
    for stop_id in own.stop_ids if len(output) < params.min_tokens else ():
        values[stop_id] = -math.inf
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id, value in enumerate(values):
        if token_id in history:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token_id)
        value -= params.presence_penalty * (token_id in output)
        values[token_id] = value
    return values
