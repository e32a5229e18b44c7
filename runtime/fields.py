"""What pydantic does not take, as Refused: the field by its path, the value, and what to give instead."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from hemiola.runtime.errors import Code, Name, Refused, joined, one_line, shown

MOST_CHARACTERS = 80  # of a name that nobody knows
WANTED = {  # pydantic's type of an error -> what to give
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "string_unicode": "valid Unicode",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a text that {pattern} matches",
    "string_too_long": "at most {max_length} characters",
    "too_long": "at most {max_length} entries",
    "union_tag_invalid": "{expected_tags}",
    "none_required": "nothing",
}
CODE_OF: dict[str, Code] = {  # others are wrong_type
    "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range",
    "less_than": "out_of_range",
    "less_than_equal": "out_of_range",
    "finite_number": "out_of_range",
    "int_parsing_size": "out_of_range",
    "literal_error": "out_of_range",
    "union_tag_invalid": "out_of_range",
    "string_pattern_mismatch": "malformed",
    "string_unicode": "malformed",
    "string_too_long": "too_long",
    "too_long": "too_long",
}


def refused_by(
    error: ValidationError, given: object, names: Sequence[str] = (), instead: str = ""
) -> Refused:
    """given: what was validated; names: the fields that there are; instead: the way out, where a user cannot
    give another value."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda one: len(one["loc"]))  # of a choice of types, each reports what it misses
    field = field_of(first["loc"], given)
    limits = first.get("ctx", {})
    match first["type"]:
        case "value_error" if isinstance(cause := limits.get("error"), Refused):  # by a validator of ours
            return cause if _knows(cause.field, field) else cause.under(field)
        case "extra_forbidden":
            options = f"the options are {', '.join(names)}" if names else ""
            return Refused("unknown", field, message=f"unknown option {field!r}", way_out=instead or options)
        case "missing":
            return missing(joined(field, str(first["loc"][-1])), instead)
        case "union_tag_not_found":
            return missing(joined(field, str(limits["discriminator"]).strip("'")), instead)
    wanted = _wanted([one for one in errors if field_of(one["loc"], given) == field])
    limit, way_out = (f"expected {wanted}", instead) if instead else ("", f"give {wanted}")
    code, value = CODE_OF.get(first["type"], "wrong_type"), first["input"]
    if not field:
        return Refused(code, message=f"the body is {shown(value)}", way_out=way_out)
    return Refused(code, field, value, limit, way_out)


def missing(field: str, instead: str = "") -> Refused:
    return Refused("missing", field, message=(Name(field), " is missing"), way_out=instead or "give it")


def field_of(loc: Sequence[int | str], given: object) -> str:
    """The path of a value. Steps of pydantic's that lead to nothing in `given` name a type."""
    field = ""
    for step in loc:
        if isinstance(step, int) and not isinstance(given, Mapping):
            field += f"[{step}]"
            given = given[step] if isinstance(given, (list, tuple)) and step < len(given) else None
        elif isinstance(given, Mapping) and step in given:
            field = f"{field}[{step}]" if isinstance(step, int) else joined(field, step[:MOST_CHARACTERS])
            given = given[step]
    return field


def _knows(field: str, place: str) -> bool:
    """Whether a validator's field has its place already, as those of fields have."""
    return not place or field.startswith(place) or place.endswith(field)


def _wanted(errors: Sequence[Mapping[str, Any]]) -> str:
    return " or ".join(dict.fromkeys(map(_wants, errors)))


def _wants(error: Mapping[str, Any]) -> str:
    limits = {name: f"{x:g}" if isinstance(x, float) else x for name, x in error.get("ctx", {}).items()}
    words = WANTED.get(error["type"])
    return words.format(**limits) if words else one_line(error["msg"])
