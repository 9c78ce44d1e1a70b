"""Chat templates of hostile models fail quickly, with an error of the request."""

import time

import pytest

from parrot.protocol.errors import InvalidRequest
from parrot.serve.config import CoreConfig
from parrot.serve.prompts import templates
from parrot.serve.prompts.templates import ModelTemplate
from tests.gateway.vendors.conftest import MODEL, serve
from tests.support.cpu_speed import is_within, slowness
from tests.support.fake_engine import fake_engine

WITHIN_CPU_S = 1.5  # For busy machines. The limit on the work corresponds to 0.1 to 0.3 s.
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
DOUBLED = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}"

HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in messages %}x{% endfor %}{% endfor %}" * 4,
    "{% for i in range(99999) %}" + "{% set a = i %}" * 5000 + "{% endfor %}",
    "{% for i in range(99999) %}{% if range(99999)|max %}{% endif %}{% endfor %}",
    "{% set ns = namespace(x='a' * 30000000) %}{% for i in range(99999) %}"
    "{% if 'b' in ns.x %}{% endif %}{% endfor %}",
    "{% macro f() %}" + "{% set a = 1 %}" * 5000 + "{% endmacro %}"
    "{% for i in range(9999) %}{{ f() }}{% endfor %}",
    "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 900000000 }}",
    "{{ messages[0].content * 900000000 }}",
    "{{ ['a'] * 900000000 }}",
    "{{ 900000000 * ['a'] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='') %}{% for i in range(99999) %}{% set ns.x = ns.x + 'aaaaaaaa' %}"
    "{% endfor %}" * 4,
    "{% for i in range(99999) %}{{ 'a' + '" + "b" * 1000 + "' }}{% endfor %}",
    DOUBLED + "{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x|replace('a', 'aaaa') %}{% endfor %}",
    NESTED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    NESTED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    NESTED + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x == ns.x }}",
    NESTED + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    NESTED + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x|string }}",
    NESTED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    NESTED + "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{{ messages|tojson(indent=900000000) }}",
    "{{ 'a\\n'|indent(900000000) }}",
    "{{ 'a'.center(900000000) }}",
    "{{ 'a'.zfill(900000000) }}",
    "{{ '{:900000000}'.format(1) }}",
    "{{ '%900000000d' % 1 }}",
    "{{ 'a'|center(900000000) }}",
    "{{ lipsum(900000) }}",
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{{ [].pop() }}",
    "{{ messages[5].content.x.y }}",
    "{{ range(10 ** 9) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception(range(99999)|list) }}",
    "{{ strftime_now('%Y' * 900000000) }}",
    "{% for i in range(99999) %}{{ messages|tojson }}{% endfor %}",
    "{% for i in range(99999) %}{{ messages|string }}{% endfor %}" * 4,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ x }}" * 100_000,
    "{{ '\\ud800' }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source[:60])
def test_a_hostile_template_is_an_error_of_the_request(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="chat template"):
        ModelTemplate(source).render(MESSAGES)
    assert is_within(time.thread_time() - began, WITHIN_CPU_S)


@pytest.mark.parametrize("name", ["format(1)", "format_map({})", "center(900)", "zfill(900)"])
def test_operations_with_huge_results_do_not_start(name: str) -> None:
    with pytest.raises(InvalidRequest, match="its result may have any size"):
        ModelTemplate(f"{{{{ '{{:900000000}}'.{name} }}}}").render(MESSAGES)


HARMLESS = {
    "{% for m in messages %}{{ '<' + m.role + '>' + m['content'] + '\n' }}{% endfor %}": (
        "<user>Hello\n<assistant>Hi\n"
    ),
    "{% for m in messages[::-1] %}{{ loop.index0 % 2 }}{{ loop.last }}{% endfor %}": "0False1True",
    "{{ [1, 'a', none]|tojson }}{{ {'a': [1]}|tojson(indent=1) }}": (
        '[1, "a", null]{\n "a": [\n  1\n ]\n}'
    ),
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k ~ v }},{% endfor %}": "a1,b2,",
    "{{ 'a' + 'b' + messages[0].role + 'c' }}{{ (1 + 2)|string + 'd' }}": "abuserc3d",
    "{% set a, b = 1, 2 %}{{ a + b }}{{ 2 ** 3 }}{{ 6 * 7 }}{{ -1 }}": "3842-1",
    "{{ 'a' * 3 }}{{ ' x '.strip() }}{{ 'a,b'.split(',')|join('-') }}": "aaaxa-b",
    "{{ 'aba'.replace('a', 'c') }}{{ 'aba'|replace('b', '') }}{{ ', '.join(['a', 'b']) }}": (
        "cbcaaa, b"
    ),
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}": "1",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}": "2",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ (1, 2)[1] }}{{ [[1], [2]][1][0] }}": (
        "[1]22"
    ),
    "{% for m in messages if m.role == 'user' %}{{ m.content|trim|upper }}{% endfor %}": "HELLO",
    "{% for x in range(3) %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}": "02",
    "{{ [1] + [2, 3] }}{{ 7 % 4 }}{{ 'a' in 'abc' }}": "[1, 2, 3]3True",
}


@pytest.mark.parametrize("source", HARMLESS)
def test_usual_operations_of_templates_work(source: str) -> None:
    assert ModelTemplate(source).render(MESSAGES) == HARMLESS[source]


HONEST = """
{%- set ns = namespace(looks=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looks and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.looks = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start|>' + message.role + '\n' + content + '<|end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reason = '' %}
        {%- if '</think>' in content %}
            {%- set reason = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|start|>' + message.role + '\n' + (reason if loop.index0 > ns.last else '') }}
        {{- content.lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + call.function.arguments|tojson + '</call>' }}
        {%- endfor %}
        {{- '<|end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool>' }}{{- content }}{{- '</tool>' }}
    {%- endif %}
{%- endfor %}"""
CALL = {"function": {"name": "f", "arguments": {"a": [1, 2, 3]}}}
ROUND = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>x</think>y", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "<think>x</think>Hi"},
]


@pytest.mark.parametrize(("template", "times_slower"), [(HONEST, 4.0), (HONEST * 8, 1.0)])
def test_an_honest_template_of_a_long_chat_is_not_rejected(
    template: str, times_slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on a machine with a quarter of the reference speed, nor if the template does eight
    times the usual work."""
    cpu_s, factor = time.thread_time, times_slower / slowness()
    monkeypatch.setattr(templates, "thread_time", lambda: factor * cpu_s())
    assert ModelTemplate(template).render(ROUND * 300)


async def test_a_template_that_shows_a_lone_surrogate_is_rejected_before_an_engine() -> None:
    """No engine could receive the text, so no attempt is made."""
    template = "{{ '\\ud800' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    engine = fake_engine("e0", model=MODEL, chat_template=template)
    messages = [{"role": "user", "content": "Hi"}]
    async with serve(CoreConfig(), engine) as site:
        for path, fields in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 5}),
            ("/v1/responses", {"input": "Hi"}),
        ):
            status, answer = await site.send(path, {"model": MODEL, **fields})
            assert status == 400, answer
            assert "chat template failed" in answer["error"]["message"]
        scope = await site.post("/v1/session", {})
        call = await site.post(
            "/v1/semantic_call",
            scope
            | {"template": "Hi {{o}}", "chat": True}
            | {"parameters": [{"name": "o", "is_output": True}]},
        )
        path = f"/v1/semantic_var/{call['param_info'][-1]['var_id']}"
        async with site.http.get(path, params=scope) as read:
            assert read.status == 400, await read.text()
    assert not engine.requests
