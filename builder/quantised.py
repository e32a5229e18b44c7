"""Checkpoints with quantised weights: refused by name, with what the architectures asked for lack."""

from collections.abc import Sequence
from typing import Any

from hemiola.runtime.arch import ARCHS
from hemiola.runtime.errors import Refused

MODELOPT = "hf_quant_config.json"
SINCE = {"FP8": 89, "NVFP4": 100}  # the first compute capability whose tensor cores multiply it


def refuse_quantised(
    where: str, config: dict[str, Any], modelopt: dict[str, Any] | None, archs: Sequence[str]
) -> None:
    """`config` is config.json's content, `modelopt` that of the file beside it, if there is one."""
    text = config.get("text_config")
    own = config.get("quantization_config")
    own = own or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not own and modelopt is None:
        return
    found = own if isinstance(own, dict) else {"quant_method": own} if own else {}
    beside = (modelopt or {}).get("quantization") or {}
    declared = [each for each in (found, beside) if each]
    if declared and all(map(is_about_pages, declared)):
        return
    kinds = kinds_of(found) or kinds_of(beside)
    source = f"quantization_config, quant_method {found.get('quant_method', '?')}" if own else MODELOPT
    raise Refused(
        f"{where}: weights are {' and '.join(kinds) or 'quantised'} ({source}), and this version reads"
        f" bf16, fp16 and fp32;{_lacks(kinds, archs)} use the bf16 checkpoint"
    )


def is_about_pages(declared: dict[str, Any]) -> bool:
    """Of keys and values in e4m3 alone: such a checkpoint has scales for them, and weights as they were."""
    scheme = declared.get("kv_cache_scheme")  # AutoFP8 writes a word
    in_e4m3 = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    in_e4m3 |= declared.get("kv_cache_quant_algo") == "FP8"
    makers = (None, "compressed-tensors", "modelopt")  # the methods that can leave weights as they were
    return in_e4m3 and declared.get("quant_method") in makers and not kinds_of(declared)


def kinds_of(declared: dict[str, Any]) -> list[str]:
    """FP8, NVFP4, ... of the weights, as their makers write it."""
    algorithm, method = str(declared.get("quant_algo") or ""), str(declared.get("quant_method", ""))
    if layers := declared.get("quantized_layers"):
        names = [str(layer.get("quant_algo", "?")) for layer in layers.values()]
    elif algorithm:
        names = [algorithm]
    elif groups := declared.get("config_groups"):
        names = [_of_group(group.get("weights") or {}) for group in groups.values()]
    elif method == "fp8":
        names = ["FP8"]
    else:
        names = [f"INT{declared['bits']}"] if "bits" in declared else []
    return sorted({next((kind for kind in SINCE if kind in name), name) for name in names})


def _of_group(weights: dict[str, Any]) -> str:
    bits, is_float = weights.get("num_bits", "?"), weights.get("type") == "float"
    return {8: "FP8", 4: "NVFP4"}.get(bits, f"FP{bits}") if is_float else f"INT{bits}"


def _lacks(kinds: Sequence[str], archs: Sequence[str]) -> str:
    """What the architectures' tensor cores do not multiply."""
    told = []
    numbers = {name: known for name in archs if (known := ARCHS[name].capability)}
    for kind in (kind for kind in kinds if kind in SINCE):
        lacking = [name for name, (major, minor) in numbers.items() if 10 * major + minor < SINCE[kind]]
        if lacking:
            told.append(f" {', '.join(lacking)} cannot multiply {kind}, sm_{SINCE[kind]} and newer can;")
    return "".join(told)
