"""What all parts of a body are."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]  # ends at the first bad one: a million errors take 9 s


class Body(BaseModel):
    """Strict; null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def names(self) -> dict[str, str]:
        """What this kind of body calls the fields that the engine, or a chat, refuses."""
        return {}
