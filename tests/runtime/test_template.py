"""A stranger's chat template: what it may do is limited, and it reaches nothing of Python."""

# ruff: noqa: E501

import json
import subprocess
import sys
import tracemalloc

import pytest

from hemiola.runtime import template as rendering
from hemiola.runtime.errors import Refused
from hemiola.runtime.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hé <b>", "tool_calls": [{"arguments": {"a": [1, 2]}}]}]
LINES = "{% set lines = 'a\\n' * 100000 %}"
ZEROS = "{% set zeros = [0] * 9999 %}"
LONG = "{% set s = '" + "x" * 1000 + "' * 1000 %}"
MANY = "{% for i in range(2000) %}"
TWO = "{% set a = '" + "x" * 999 + "' * 300 %}{% set b = '" + "x" * 999 + "' * 300 %}"  # equal, not the same
VIEW = "{% set d = dict(range(9999) | batch(2)) %}"
HELD = "{% set held = namespace(s='" + "x" * 100 + "' * 1000, l=[1] * 9999) %}"  # of no size itself
HEX = (
    "{% set a = ('"
    + "f" * 999
    + "' * 10) | int(0, 16) %}{% set b = ('"
    + "f" * 999
    + "' * 5) | int(0, 16) %}"
)
NESTED = "{% set n = namespace(s=(1,)) %}"
LIMIT = 2**21  # of the work in these tests: a sixteenth of a server's
# name: a template that would take hours or all memory, or more work than LIMIT in few turns
ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested_loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops_of_sets": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
    "loop_within_itself": "{% for i in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "turns_of_a_loop_within_itself": "{% for i in [1] recursive %}{% if loop.depth == 1 %}"
    "{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "filtered_loop": "{% for i in range(99999) for j in x %}{% endfor %}",
    "macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "call": "{% macro m(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m(1) %}" * 19 + "x" * 999 + "{% endcall %}" * 19,
    "times": "{{ 'a' * 10**10 }}",
    "times_left": "{{ 10**10 * 'a' }}",
    "list_times": "{{ ([1] * 10**10) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "numbers": "{% set n = namespace(n=9) %}{% for i in range(99) %}{% set n.n = n.n * n.n %}{% endfor %}",
    "plus": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "list_plus": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "slow_plus": "{% set n = namespace(s='') %}{% for i in range(99999) %}{% set n.s = n.s + 'abcdef' %}{% endfor %}",
    "lists_of_lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}",
    "dicts": "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = {1: n.s, 2: n.s} %}{% endfor %}",
    "dict_calls": "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}",
    "tuples": "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}",
    "batches": "{% set n = namespace(s=1) %}{% for i in range(60) %}"
    "{% set n.s = [n.s] | batch(2, n.s) | list %}{% endfor %}",
    "mapped": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set n.s = [x, x] | map('default', n.s) | list %}{% endfor %}",
    "center": "{{ 'a' | center(10**10) }}",
    "mapped_center": "{{ ['a'] | map('center', 10**10) | list }}",
    "indent": LINES + "{{ lines | indent(10**6) }}",
    "indent_by_text": LINES + "{{ lines | indent(lines) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "format_star": "{{ '%*d' | format(10**10, 1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent_list": "{{ '%s%s' % ('a' * 10**7, 'a' * 10**8) }}",
    "method_format": "{{ '{:10000000000}'.format(1) }}",
    "method_format_nested": "{{ '{:{}}'.format(1, 10**10) }}",
    "method_center": "{{ 'a'.center(10**10) }}",
    "method_ljust": "{{ 'a'.ljust(10**10) }}",
    "method_rjust": "{{ 'a'.rjust(width=10**10) }}",
    "method_zfill": "{{ 'a'.zfill(10**10) }}",
    "method_expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "method_replace": LINES + "{{ lines.replace('a', lines) }}",
    "method_join": LINES + "{{ lines.join(lines) }}",
    "method_translate": LINES + "{{ lines.translate({97: lines}) }}",
    "method_to_bytes": "{{ (1).to_bytes(10**10) }}",
    "method_encode": "{{ 'a'.encode().center(10**10) }}",
    "replace": LINES + "{{ lines | replace('a', lines) }}",
    "join": LINES + "{{ lines | join(lines) }}",
    "join_mapped": LINES + "{{ lines | list | map('upper') | join(lines) }}",
    "batch": "{{ [1] | batch(10**10, 1) | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "round": "{{ 1.5 | round(10**10, 'ceil') }}",
    "round_to_thousands_of_digits": "{{ 15 | round(3000, 'ceil') }}",
    "tojson_indent": "{{ [1] | tojson(indent=10**10) }}",
    "tojson": "{% for i in range(99999) %}{% set x = range(999) | list | tojson %}{% endfor %}",
    "sum": "{{ range(9999) | map('list') }}{{ ([[1] * 1000] * 90000) | sum(start=[]) }}",
    "lists": "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "compared": LINES + "{% for i in range(300) %}{% if 'b' in lines %}{% endif %}{% endfor %}",
    "counted": LINES + "{% for i in range(300) %}{% if lines.count('b') %}{% endif %}{% endfor %}",
    "join_held": HELD + "{{ ([held] * 3000) | map(attribute='s') | join }}",
    "join_attribute": HELD + "{{ ([held] * 3000) | join('', 's') }}",
    "join_method_held": HELD + "{{ ''.join(([held] * 3000) | map(attribute='s')) }}",
    "sum_held": HELD + "{{ ([held] * 99) | sum('l', []) | length }}",
    "sum_mapped": HELD + "{{ ([held] * 99) | map(attribute='l') | sum(start=[]) | length }}",
    "selected": ZEROS + "{% for i in range(1000) %}{% set x = zeros | select('odd') | first %}{% endfor %}",
    "rejected": ZEROS + "{% for i in range(1000) %}{% set x = zeros | select | first %}{% endfor %}",
    "smallest": ZEROS + "{% for i in range(1000) %}{% set x = zeros | min %}{% endfor %}",
    "trimmed": "{% set s = ' ' * 100000 %}{% for i in range(999) %}{% set x = s | trim %}{% endfor %}",
    "counted_words": "{% set s = ' ' * 100000 %}{% for i in range(99) %}{% set x = s | wordcount %}{% endfor %}",
    "tested": LINES + "{% for i in range(300) %}{% if lines is eq(lines) %}{% endif %}{% endfor %}",
    "tested_each": LINES + "{{ range(300) | select('ne', lines) | list | length }}",
    "nested_compared": "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(13) %}{% set n.s = [n.s, n.s] %}"
    "{% set n.t = [n.t, n.t] %}{% endfor %}{% for i in range(99) %}{% if n.s == n.t %}{% endif %}{% endfor %}",
    "joiner": "{{ lipsum(10**9) }}",
    "urlize": LINES + "{{ lines | urlize }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "text": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "numeral": "{{ " + "9" * 5000 + " }}",
    "slices": LONG + MANY + "{% set x = s[1:] %}{% endfor %}",
    "slices_of_lists": ZEROS + MANY + "{% set x = zeros[1:] %}{% endfor %}",
    "texts_of_blocks": MANY + "{% set x %}" + "x" * 999 + "{{ i }}y{% endset %}{% endfor %}",
    "filtered_texts_of_blocks": MANY + "{% set x | trim %}" + " " * 999 + "{{ i }}y{% endset %}{% endfor %}",
    "filtered_blocks": MANY + "{% filter trim %}" + " " * 999 + "{{ i }}{% endfilter %}{% endfor %}",
    "arguments_of_a_macro": ZEROS + "{% macro m() %}{% endmacro %}" + MANY + "{% set x = m(*zeros) %}{% endfor %}",
    "arguments_of_a_cycler": ZEROS + MANY + "{% set x = cycler(*zeros) %}{% endfor %}",
    "arguments_of_a_cycle": ZEROS + MANY + "{% set x = loop.cycle(*zeros) %}{% endfor %}",
    "pairs_of_a_dict": "{% set pairs = ['ab'] * 9999 %}" + MANY + "{% set x = dict(pairs) %}{% endfor %}",
    "changed": TWO + MANY + "{% set x = loop.changed(a if i % 2 else b) %}{% endfor %}",
    "keys": TWO + "{% set d = {a: 1} %}" + MANY + "{% set x = d[b] %}{% endfor %}",
    "keys_of_a_call": TWO + "{% set d = {a: 1} %}" + MANY + "{% set x = d.get(b) %}{% endfor %}",
    "sorted": TWO + "{% set l = [a, b] %}" + MANY + "{% set x = l | sort %}{% endfor %}",
    "unique": TWO + "{% set l = [a, b] %}" + MANY + "{% set x = l | unique | first %}{% endfor %}",
    "least": TWO + "{% set l = [a, b] %}" + MANY + "{% set x = l | min %}{% endfor %}",
    "sorted_held": TWO + "{% set l = [namespace(s=a), namespace(s=b)] %}"
    + MANY + "{% set x = l | sort(attribute='s,s') %}{% endfor %}",
    "grouped_held": TWO + "{% set l = [namespace(s=a), namespace(s=b)] %}"
    + MANY + "{% set x = l | groupby('s') %}{% endfor %}",
    "found_from_the_end": "{{ ('" + "a" * 999 + "' * 90).rfind('ab' + '" + "a" * 999 + "' * 45) }}",
    "split_from_the_end": "{{ ('" + "a" * 999 + "' * 90).rsplit(sep='ab' + '" + "a" * 999 + "' * 45) }}",
    "stripped": "{{ ('" + "x" * 999 + "' * 90).strip('" + "y" * 999 + "' * 90 + 'x') }}",
    "trimmed_of": "{{ ('" + "x" * 999 + "' * 90) | trim(chars='" + "y" * 999 + "' * 90 + 'x') }}",
    "striptags": "{{ ('<!---->' * 999 * 9 | safe).striptags() }}",
    "asked_characters": LONG + "{% for i in range(99) %}{% set x = s.isupper() %}{% endfor %}",
    "tested_characters": LONG + "{% for i in range(99) %}{% set x = s is upper %}{% endfor %}",
    "numbers_of_digits": "{% set s = '" + "9" * 4000 + "' %}" + MANY + "{% set x = s | int %}{% endfor %}",
    "numbers_in_base_16": LONG + "{% for i in range(99) %}{% set x = s | int(0, 16) %}{% endfor %}",
    "in_a_range": MANY + "{% set x = 'a' in range(99999) %}{% endfor %}",
    "counted_in_a_range": MANY + "{% set x = range(99999).count('a') %}{% endfor %}",
    "in_what_is_mapped": MANY + "{% set x = 'a' in range(999) | map(attribute='real') %}{% endfor %}",
    "least_of_what_is_mapped": MANY + "{% set x = range(999) | map(attribute='real') | min %}{% endfor %}",
    "in_values": VIEW + MANY + "{% set x = 'a' in d.values() %}{% endfor %}",
    "numbers_divided": HEX + "{{ (a // b) is odd }}",
    "remainders": HEX + "{{ (a % b) is odd }}",
    "tests_for_remainders": HEX + "{{ a is divisibleby(b) }}",
    "literals_divided": "{{ (0x" + "f" * 9999 + " // 0x" + "f" * 5000 + ") is odd }}",
    "tests_of_literals": "{{ 0x" + "f" * 9999 + " is divisibleby(0x" + "f" * 5000 + ") }}",
    "arguments_in_arguments": NESTED + "{% macro m() %}{% set n.s = varargs %}{% endmacro %}"
    + MANY + "{{ m(n.s) }}{% endfor %}",
    "arguments_by_name_in_arguments": NESTED + "{% macro m() %}{% for p in kwargs | items %}{% set n.s = p %}{% endfor %}"
    "{% endmacro %}" + MANY + "{{ m(a=n.s) }}{% endfor %}",
    "less_keys": VIEW + MANY + "{% set x = d.keys() - d.keys() %}{% endfor %}",
}  # fmt: skip


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LEAST_WORK", LIMIT)


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("how", ENDLESS)
def test_a_template_that_would_not_end_is_refused(how: str) -> None:
    with pytest.raises(Refused, match=r"^the chat template ") as refusal:
        ChatTemplate(ENDLESS[how]).render({"messages": MESSAGES})
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


# thousands of times twenty, what is put into itself, and how all of it is read
DEEP = {
    "filters": (1, "{% set n.s = n.s | select %}", "{{ n.s | list }}"),
    "arguments": (7, "{{ m(n.s) }}", "{{ {n.s: 1} | length }}"),
}


@pytest.mark.parametrize("what", DEEP)
def test_a_template_that_puts_things_into_each_other_ends_the_process(what: str) -> None:
    """Python frees generators, and hashes tuples, without a look at how much of a thread's stack is left."""
    template = NESTED + "{% macro m() %}{% set n.s = varargs %}{% endmacro %}"
    times, put, read = DEEP[what]
    loops = f"{{% for j in range({times}) %}}{{% for i in range(20000) %}}"
    template += loops + put + "{% endfor %}" * 2 + read
    code = (
        "from threading import Thread\n"
        "from hemiola.runtime.errors import Refused\n"
        "from hemiola.runtime.template import ChatTemplate\n"
        "def render():\n"
        "    try:\n"
        f"        ChatTemplate({template!r}).render({{}})\n"
        "    except Refused as error:\n"
        "        print(error)\n"
        "thread = Thread(target=render)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout[:18]) == (0, "the chat template "), ended


# name: a template that is refused when its text has been made, if it is not refused before
LARGE = {name: ENDLESS[name] for name in ("join_held", "join_attribute", "join_method_held")} | {
    "join_separators": LONG + "{{ range(200) | join(s) }}",
    "join_method_separators": LONG + "{{ s.join('" + "a" * 200 + "') }}",
    "indent_by_text": LONG + "{{ ('a\n' * 200) | indent(s) }}",
    "tilde": LONG + "{{ " + " ~ ".join(["s"] * 200) + " }}",
    "tojson_separators": LONG + "{{ range(200) | list | tojson(separators=(s, ':')) }}",
    "tojson_indent_by_text": LONG + "{{ range(200) | list | tojson(indent=s) }}",
    "replace_counted": LONG + "{{ s | replace('x', '" + "y" * 200 + "', 10**7) }}",
    "replace_by_name": LONG + "{{ s | replace(new='" + "y" * 200 + "', old='x') }}",
}  # fmt: skip


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("how", LARGE)
def test_a_long_text_is_refused_before_it_is_made(how: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="more work"):
            ChatTemplate(LARGE[how]).render({"messages": MESSAGES})
        assert tracemalloc.get_traced_memory()[1] < 64 * LIMIT
    finally:
        tracemalloc.stop()


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '' | attr('\\x5f_class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | groupby('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ '{0}'.format_map({'a': 1}) }}",
    "{{ ('{:5}' | safe).format('a') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__}'.format] | map('string') | list }}{{ ('{0.__class__}' | attr('format'))('') }}",
    "{{ ('{0.__class__}' | safe).format('') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__class__ }}",
    "{{ range.__globals__ }}",
    "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ dict.mro() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ get_flashed_messages.__globals__ }}",
]  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_reaches_nothing_of_python(escape: str) -> None:
    before = json.dumps(MESSAGES)
    with pytest.raises(Refused, match=r"^the chat template "):
        ChatTemplate(escape).render({"messages": MESSAGES})
    assert json.dumps(MESSAGES) == before


ORDINARY = [
    "{{ messages | tojson(indent=2) }}{{ messages[0].content | trim | upper }}",
    "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.index0 }}{{ loop.previtem }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }}{% else %}none{% endfor %}",
    "{% for k, v in messages[0] | items if k != 'role' %}{{ k }}{{ v | string }}{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.content.split('<b>')[0].rstrip('\\n') + 'x' }}{% endfor %}",
    "{{ '%s and %05d' | format('a', 7) }}{{ '{} {a:>5}'.format(1, a=2) }}{{ '-' * 9 }}{{ 7 % 3 }}{{ 2 ** 5 }}",
    "{% macro m(x, y='q') %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ m(1) }}{% call m(2) %}c{% endcall %}",
    "{% set n = namespace(a=[], b={}) %}{% for i in range(5) %}{% set n.a = n.a + [i] %}{% endfor %}{{ n.a }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | join(', ') }}",
    "{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is iterable else i }}{{ loop.depth }}{% endfor %}",
    "{{ 'user' in ['user', 'b'] }}{{ (1, 2) == (1, 2) }}{{ 1 < 2 < 3 }}{{ messages[0].content is string }}",
    "{{ 'a b' | truncate(10**12) }}{{ 'a b c' | truncate(3, leeway=0) }}{{ 15 | round(2) }}{{ ['a', 'b'] | join('-' * 9) }}",
    "{{ none }}{{ undefined }}{{ true }}{{ 1.5 | round(1) }}{{ 'a\\nb' | indent(4) }}{{ {'a': 1} }}{{ [1, 'x'] }}",
    "{% for i in nothing %}{% endfor %}{% for c in 'abc' %}{{ c }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    "{{ dict(a=1) }}{{ ['b', 'a'] | sort | first }}{{ 'a,b'.split(',') | last }}{{ '<b>' | e }}{{ ' '.join(['a', 'b']) }}",
    "{{ messages[0].get('x', 'y') }}{{ 'abc'.replace('b', 'zz') | replace('a', 'q') }}{{ 'x'.center(5) }}{{ 'x' | center(5) }}",
    "{{ ['b', 'A', 'a'] | sort }}{{ messages | groupby('role') | length }}{{ ['a', 'b', 'A'] | unique | list }}{{ [3, 1] | min }}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m) }}{{ loop is defined }}{% endfor %}{{ 'user' in messages | map(attribute='role') }}",
    "{% macro m(l) %}{{ l.index0 }}{% endmacro %}{% for i in [1, 2] %}{{ m(loop) }}{% endfor %}{{ '7' | int + '2.5' | float }}{{ 'abc'[1:] }}{{ [1, 2][:1] }}",
    "{% set x | trim | upper %} a{{ 1 }} {% endset %}{{ x }}{% set y %}b{% endset %}{{ y }}{{ 'xay' | trim('xy') }}{{ 'a</t>b</t>c'.rsplit('</t>', 1) }}",
    "{% filter upper | trim %} a{{ 1 }} {% endfilter %}{{ [1, 2, 3] | select('odd') | list }}{{ 7 - 2 }}{{ 'a' | replace('a', 'b') | replace(new='c', old='b') }}{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}",
    "{{ messages[0].tool_calls[0].arguments | dictsort }}{{ [1, 2, 3] | batch(2) | list }}{{ [3, 1] | sum }}{{ [] or 'e' }}",
]  # fmt: skip


@pytest.mark.parametrize("template", ORDINARY)
def test_counting_changes_nothing(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (wanted,), _ = render_jinja_template(conversations=[MESSAGES], chat_template=template)
    assert ChatTemplate(template).render({"messages": MESSAGES}) == wanted


def test_a_long_conversation_is_rendered() -> None:
    """A template that looks at all messages for each of them, as some do."""
    template = (
        "{% for m in messages %}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ m.role + ': ' + (m.content | trim) + '\n' }}{% endfor %}{{ messages | tojson }}"
    )
    messages = [{"role": "user", "content": "x" * 9999} for _ in range(500)]
    assert len(ChatTemplate(template).render({"messages": messages})) > 2 * 500 * 9999


def test_a_long_conversation_whose_template_asks_for_its_length_each_time_is_too_much_work() -> None:
    template = "{% for m in messages[::-1] %}{% set at = (messages | length - 1) - loop.index0 %}{{ at }},{% endfor %}"
    messages = [{"role": "user", "content": "x"} for _ in range(4000)]
    assert ChatTemplate(template).render({"messages": messages}).startswith("3999,3998,")


@pytest.mark.usefixtures("small_limit")
def test_a_rendering_takes_no_work_from_the_next() -> None:
    template = ChatTemplate("{% for i in range(9000) %}{{ i }}{% endfor %}")
    assert len({template.render({"messages": MESSAGES}) for _ in range(15)}) == 1


def test_half_a_million_turns_are_rendered_and_no_more() -> None:
    turns = "{% for i in range(99000) %}{% endfor %}"
    assert ChatTemplate(turns * 5).render({"messages": MESSAGES}) == ""
    with pytest.raises(Refused, match=r"more work than 33\d{6} "):
        ChatTemplate(turns * 6).render({"messages": MESSAGES})
