"""What a checkpoint's configs say of quantised weights. It confirms what tensors show, and decides only what
they cannot show: which version of GPTQ it is, how a ragged row is cut into groups."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hemiola.plugins.inputs import SPAN
from hemiola.runtime.errors import Refused, one_line, shown

MODELOPT = "hf_quant_config.json"
SINCE = {"FP8": 89, "NVFP4": 100}  # the first compute capability whose tensor cores multiply it
KINDS = {
    "FP8": "e4m3",
    "NVFP4": "e2m1",
    "INT4": "int4",
    "INT8": "int8",
}  # as makers and as groups.py call them
READ = "bf16, fp16, fp32, FP8, NVFP4, INT4 and INT8"
PACKINGS = ("pack-quantized", "float-quantized", "int-quantized", "nvfp4-pack-quantized")  # CT's
ALGORITHMS = (  # of ModelOpt
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4",
    "MIXED_PRECISION", "NONE",
)  # fmt: skip
GROUP, TENSOR = "group", "tensor"  # dynamic scales of inputs: for a token and SPAN of them, for all tokens
INPUTS = {  # of ModelOpt's algorithms; PB_WO is for weights alone
    "FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "token", "FP8_BLOCK_SCALES": GROUP,
}  # fmt: skip
WHOLE_ROW = 2**31  # a group size that no matrix has
OBJECT, TWO = "an object", "two numbers, outputs and inputs of a block"
WAY_OUT = "use the bf16 checkpoint"


class Declared(NamedTuple):
    """What configs say. The defaults: nothing."""

    where: str  # the file, for errors
    method: str = ""
    names: tuple[str, ...] = ()  # of KINDS
    group_sizes: frozenset[int] = frozenset()
    block: tuple[int, int] = (128, 128)  # outputs, inputs
    symmetric: bool = False  # codes have one zero point, their middle
    asymmetric: bool = False  # all of them have zero points of their own
    inputs: frozenset[str] = frozenset()  # of FP8 weights, as formats/inputs.py reads them; "": wide ones
    zero_version: int = 0  # of GPTQ's zero points: 1, 2, or 0 where nobody says

    @property
    def kinds(self) -> set[str]:
        return {KINDS[name] for name in self.names}


def read_declared(
    where: str, config: dict[str, Any], modelopt: dict[str, Any] | None, methods: Sequence[str]
) -> Declared | None:
    """`config` is config.json's content, `modelopt` that of the file beside it, `methods` are those of the
    formats. None: they declare nothing of weights. Raises Refused for what is not supported, and for two that
    disagree."""
    text = config.get("text_config")
    quant = config.get("quantization_config")
    quant = quant or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not quant and modelopt is None:
        return None
    inside = quant if isinstance(quant, dict) else {"quant_method": str(quant)} if quant else {}
    beside = (modelopt or {}).get("quantization") or {}
    _check_kinds(where, inside)
    _check_kinds(MODELOPT, beside)
    declared = [each for each in (inside, beside) if each]
    if declared and all(map(is_about_pages, declared)):
        return None
    if not declared:
        message = f"{where}: weights are quantised ({MODELOPT} does not say how)"
        raise Refused("unsupported", "quantization", message=message, way_out=WAY_OUT)
    _refuse_disagreement(where, inside, beside)
    names = kinds_of(inside) or kinds_of(beside)
    method = str(inside.get("quant_method") or ("modelopt" if beside else "")).removeprefix("intel/")
    source = f"quantization_config, quant_method {method or '?'}" if quant else MODELOPT
    told = f"{where}: weights are {one_line(' and '.join(names)) or 'quantised'} ({one_line(source)})"
    for each in declared:
        _refuse_unknown(told, method, each, methods)
    if any(name not in KINDS for name in names):
        message = f"{told}, and this version reads {READ}"
        raise Refused("unsupported", "quantization_config", message=message, way_out=WAY_OUT)
    return Declared(
        where,
        method,
        tuple(names),
        frozenset(size for each in declared for size in _group_sizes(each)),
        _block(inside),
        _symmetric(inside),
        _asymmetric(inside),
        frozenset(each_of for each in declared for each_of in inputs_of(each)),
        _zero_version(method, inside),
    )


def _check_kinds(where: str, declared: Any) -> None:
    """What is read of a config is of the kind that makers write, whatever somebody else has written."""

    def require(name: str, value: object, is_right: bool, wanted: str) -> None:
        if not is_right:
            message = f"{where}: {name} is {shown(value)}, expected {wanted}"
            raise Refused("wrong_type", name, message=message, way_out=f"correct it, or {WAY_OUT}")

    def read(name: str, values: dict[str, Any], kind: type, wanted: str) -> Any:
        """One that is not there is empty."""
        value = values.get(name)
        require(name, value, value is None or type(value) is kind, wanted)
        return kind() if value is None else value

    def read_two(name: str, values: dict[str, Any]) -> None:
        numbers = read(name, values, list, TWO)
        is_right = all(type(number) is int and number > 0 for number in numbers)
        require(name, numbers, is_right and len(numbers) in (0, 2), TWO)

    require("quantization", declared, isinstance(declared, dict), OBJECT)
    for name in ("quant_method", "quant_algo"):
        read(name, declared, str, "a word")
    read_two("weight_block_size", declared)
    for name in ("quantized_layers", "config_groups"):
        for each in read(name, declared, dict, OBJECT).values():
            require(name, each, isinstance(each, dict), "an object of objects")
    for group in read("config_groups", declared, dict, OBJECT).values():
        weights = read("weights", group, dict, OBJECT)
        read("num_bits", weights, int, "a number")
        read_two("block_structure", weights)


def _refuse_disagreement(where: str, inside: dict[str, Any], beside: dict[str, Any]) -> None:
    for what, read in (("kinds", kinds_of), ("group sizes", lambda each: sorted(set(_group_sizes(each))))):
        ours, theirs = read(inside), read(beside)
        if ours and theirs and not set(ours) & set(theirs):
            ours, theirs = (one_line(", ".join(map(str, each))) for each in (ours, theirs))
            message = f"{where}: quantization_config declares the {what} {ours}, {MODELOPT} {theirs}"
            raise Refused("conflict", "quantization_config", message=message, way_out="correct one of them")


def _refuse_unknown(told: str, method: str, each: dict[str, Any], methods: Sequence[str]) -> None:
    """What would compute something else than codes times scales."""

    def refuse(key: str, value: object, known: Iterable[object]) -> None:
        known = " or ".join(map(repr, known))
        message = f"{told} with {key} = {shown(value)}, and this version reads only {known}"
        raise Refused("unsupported", key, message=message, way_out=WAY_OUT)

    if method not in methods:
        refuse("quant_method", method, methods)
    algorithm = str(each.get("quant_algo") or "NONE")
    layers = each.get("quantized_layers") or {}
    for name in [algorithm, *(str(layer.get("quant_algo")) for layer in layers.values())]:
        if name.upper() not in ALGORITHMS:
            refuse("quant_algo", name, ALGORITHMS)
    accepted: dict[str, tuple[object, ...]] = {
        "fmt": (None, "e4m3"),
        "transform_config": (None, {}),
        "sparsity_config": (None, {}),
        "desc_act": (None, False),
        "version": (None, "gemm", "GEMM") if method == "awq" else (each.get("version"),),
        "bits": (None, 4, 8),
    }
    for key, values in accepted.items():
        if each.get(key) not in values:
            refuse(key, each[key], values[1:])
    packing = str(each.get("format") or "")
    if packing.startswith(("mxfp", "marlin", "sparse")):
        refuse("format", packing, PACKINGS)


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
        names = [algorithm] if "MIXED" not in algorithm else []
    elif groups := declared.get("config_groups"):
        names = [_of_group(group.get("weights") or {}) for group in groups.values()]
    elif method == "fp8":
        names = ["FP8"]
    else:
        bits = [declared.get("bits"), *(rule.get("bits") for rule in _rules(declared))]
        names = [f"INT{each}" for each in bits if each is not None and each != 16]
    return sorted({next((kind for kind in SINCE if kind in name), name) for name in names})


def inputs_of(declared: dict[str, Any]) -> set[str]:
    """What a config says of the inputs of FP8 weights: of groups.INPUTS, TENSOR, or a strategy as it is."""
    if groups := declared.get("config_groups"):
        schemes = [group for group in groups.values() if _is_fp8(group.get("weights"))]
        return {_of_scheme(group.get("input_activations")) for group in schemes}
    if layers := declared.get("quantized_layers"):
        names = {str(layer.get("quant_algo")) for layer in layers.values()}
        return {INPUTS.get(name, "") for name in names if "FP8" in name}
    if declared.get("quant_method") == "fp8":
        by_block = GROUP if declared.get("weight_block_size") else TENSOR
        return {{"dynamic": by_block, "static": "static"}.get(str(declared.get("activation_scheme")), "")}
    return {INPUTS[name]} if (name := declared.get("quant_algo")) in INPUTS else set()


def _is_fp8(scheme: Any) -> bool:
    return isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")


def _of_scheme(scheme: Any) -> str:
    if not _is_fp8(scheme):
        return ""
    if not scheme.get("dynamic"):
        return "static"
    strategy, size = str(scheme.get("strategy") or TENSOR), scheme.get("group_size")
    return one_line(strategy if strategy != GROUP or size == SPAN else f"group of {size}")


def _of_group(weights: dict[str, Any]) -> str:
    bits, is_float = weights.get("num_bits", "?"), weights.get("type") == "float"
    return {8: "FP8", 4: "NVFP4"}.get(bits, f"FP{bits}") if is_float else f"INT{bits}"


def _rules(declared: dict[str, Any]) -> list[dict[str, Any]]:
    """AutoRound's and GPTQModel's for single layers."""
    known = [each for key in ("extra_config", "dynamic") if isinstance(each := declared.get(key), dict)]
    return [rule for each in known for rule in each.values() if isinstance(rule, dict)]


def _group_sizes(declared: dict[str, Any]) -> Iterable[int]:
    """Of every kind of layer; -1 and null, as well as a scale for each channel, are a whole row."""
    groups = declared.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    for each in weights:
        if each.get("strategy") in ("group", "tensor_group") or each.get("group_size"):
            yield _size(each.get("group_size"))
        elif each.get("strategy") in ("channel", "tensor"):
            yield WHOLE_ROW
    layers = (declared.get("quantized_layers") or {}).values()
    for each in (declared, *_rules(declared), *layers):
        if "group_size" in each:
            yield _size(each["group_size"])


def _size(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else WHOLE_ROW


def _block(declared: dict[str, Any]) -> tuple[int, int]:
    groups = declared.get("config_groups") or {}
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    block = declared.get("weight_block_size") or next((each for each in structures if each), None)
    return (block[0], block[1]) if block else (128, 128)


def _symmetric(declared: dict[str, Any]) -> bool:
    return declared.get("sym") is True


def _asymmetric(declared: dict[str, Any]) -> bool:
    """As compressed-tensors says it. Others refuse codes without zero points by themselves."""
    groups = (declared.get("config_groups") or {}).values()
    return bool(groups) and all((group.get("weights") or {}).get("symmetric") is False for group in groups)


def _zero_version(method: str, declared: dict[str, Any]) -> int:
    packing, form = str(declared.get("packing_format", "")), str(declared.get("checkpoint_format", ""))
    if method == "auto-round":
        return 1 if "gptq" in packing and "v2" not in packing else 2
    return 2 if form == "gptq_v2" else 1
