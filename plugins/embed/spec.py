"""The embedding of tokens; its weight lies as a dense layer wants it: models share it with their head."""

from hemiola.plugins.embed.reference import embed as reference
from hemiola.plugins.linear.spec import strips
from hemiola.plugins.spec import INT, Arg, Form, Op, Result, fp32_in_sixteens, one_dtype

EMBED = Op(
    name="embed",
    args=(Arg("weight", "VF"), Arg("token_ids", "T", INT)),
    attrs=(),
    results=(Result("TF"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens(""), {"weight": strips}, sizes="V"),
        Form("cuda", "cuda", one_dtype()),
    ),
)
