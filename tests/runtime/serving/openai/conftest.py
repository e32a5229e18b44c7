"""A front before a scripted tritonserver: no engine, so that what is tested is the front."""

from collections.abc import Callable, Iterator

import pytest
from kit import checkpoints
from kit.scripted_triton import ScriptedTriton
from openai import OpenAI

from hemiola.runtime.serving.openai.app import FrontLimits
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.text import Text

# In short, what the templates of Qwen3.5 and Nemotron-3 do.
TEMPLATE = r"""
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls %}{{ "\n<tool_call>\n<function=" + call.function.name + ">" }}
{%- for key, value in call.function.arguments | items %}
{{- "\n<parameter=" + key + ">\n" + (value if value is string else value | tojson) + "\n</parameter>" }}
{%- endfor %}{{ "\n</function>\n</tool_call>" }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and enable_thinking is false %}
</think>

{% endif %}{% endif %}"""
MAX_LEN = 512


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoints.write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Text(folder)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("bare")
    checkpoints.write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return Text(folder)


@pytest.fixture(scope="session")
def models(text: Text, bare: Text) -> dict[str, ServedModel]:
    return {
        "tiny": ServedModel("tiny", MAX_LEN, "0123456789abcdef", text, 1),
        "ids": ServedModel("ids", MAX_LEN, "0123456789abcdef", None, 1),
        "bare": ServedModel("bare", MAX_LEN, "0123456789abcdef", bare, 1),  # whose template knows no tools
    }


@pytest.fixture
def triton() -> Iterator[ScriptedTriton]:
    with ScriptedTriton() as running:
        yield running


@pytest.fixture
def start(triton: ScriptedTriton, models: dict[str, ServedModel]) -> Iterator[Callable[..., Front]]:
    """Starts a front with these limits."""
    fronts = []

    def run(
        metrics_url: str = "http://127.0.0.1:1/metrics", exit_timeout_s: float = 5, **limits: object
    ) -> Front:
        front = Front(models, limits=FrontLimits(**limits), exit_timeout_s=exit_timeout_s)
        fronts.append(front)
        front.start(triton.url, metrics_url)
        return front

    yield run
    for front in fronts:
        front.stop()


@pytest.fixture
def client(start: Callable[..., Front]) -> Iterator[OpenAI]:
    with OpenAI(base_url=start().url, api_key="any", max_retries=0) as connected:
        yield connected
