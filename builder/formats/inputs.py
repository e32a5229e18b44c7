"""Whether the inputs of a layer are e4m3, too (`build-engine --act-dtype fp8`): where its checkpoint says so.

A static scale is a tensor, X.input_scale. Of dynamic ones only configs tell: a scale for each token, or for
each token and 128 inputs. One for a whole tensor is refused, since a token would depend on its neighbours.
"""

from hemiola.builder.formats.declared import GROUP, TENSOR, Declared
from hemiola.builder.formats.module import LazyGroup, Module, Stored
from hemiola.plugins.groups import WeightGroup
from hemiola.plugins.inputs import refuses_inputs
from hemiola.runtime.errors import Code, Refused

KEY = "input_scale"
WAY_OUT = "leave --act-dtype out"


def in_e4m3(module: Module, declared: Declared, weight: LazyGroup) -> LazyGroup:
    """A matrix whose inputs are rounded as its checkpoint says, or as it is, where that says nothing."""
    if weight.layout.kind != "e4m3":
        return weight
    stored, said = module.tensors.get(KEY), declared.inputs - {""}
    if stored is not None:
        return _static(module, stored, said, weight)
    dynamic = sorted(said - {"static"})
    if not dynamic:
        if "static" in said and "" not in declared.inputs:
            module.of(KEY)
        return weight
    if len(dynamic) > 1 or "" in declared.inputs:
        names = " and ".join([*dynamic, *(["none"] if "" in declared.inputs else [])])
        _refuse(
            declared, "conflict", f"inputs of FP8 weights are rounded by {names}, and no tensor tells which"
        )
    if dynamic[0] == TENSOR:
        reason = "dynamic scales of whole tensors, by which a token's numbers depend on its neighbours"
        _refuse(declared, "unsupported", f"inputs of FP8 weights have {reason}")
    if dynamic[0] not in (GROUP, "token"):
        _refuse(declared, "unsupported", f"inputs of FP8 weights are rounded by {dynamic[0]}")
    layout = weight.layout._replace(inputs=dynamic[0])
    return _checked(module, LazyGroup(layout, lambda b=0, e=None: weight.read(b, e)._replace(layout=layout)))


def _static(module: Module, stored: Stored, said: frozenset[str], weight: LazyGroup) -> LazyGroup:
    stored.require("F32", "BF16", "F16")
    if stored.shape not in module.of_all:
        stored.require_shape()
    if said and "static" not in said:
        reason = f"is a static scale, but configs say that inputs are rounded by {' and '.join(sorted(said))}"
        raise stored.refused(reason, "correct one of them", "conflict")
    scale = stored.scales().unique()
    if scale.numel() > 1:
        raise stored.refused(
            "has unlike scales for gate and up, which have inputs in common", WAY_OUT, "unsupported"
        )

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        group = weight.read(begin, end)
        rows = (*group.tensors["codes"].shape[:-1], 1)
        return WeightGroup(layout, group.tensors | {"input": scale.expand(rows).contiguous()})

    layout = weight.layout._replace(inputs="static")
    return _checked(module, LazyGroup(layout, read, float(scale)))


def _checked(module: Module, weight: LazyGroup) -> LazyGroup:
    if reason := refuses_inputs(weight.layout):
        message = f"--act-dtype fp8: {module.name} has {reason}"
        raise Refused("unsupported", "act_dtype", message=message, way_out=WAY_OUT)
    return weight


def _refuse(declared: Declared, code: Code, reason: str) -> None:
    message = f"--act-dtype fp8: {declared.where}: {reason}"
    raise Refused(code, "act_dtype", message=message, way_out=WAY_OUT)
