# needs: instructor openai
"""Instructor's quick start: an answer as a pydantic model."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    kind: Literal["adult", "child"]


own = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(own, mode=mode)
    person = client.chat.completions.create(
        model="hemiola",
        response_model=Person,
        messages=[{"role": "user", "content": "John is a 30-year-old adult."}],
        max_tokens=400,
        temperature=0,
        max_retries=1,
    )
    assert isinstance(person, Person)
    print(person)
