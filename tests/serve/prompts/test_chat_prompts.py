"""The prompt of a chat call equals that of transformers' `apply_chat_template`."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from parrot.engine.models.checkpoint import open_checkpoint
from parrot.protocol.engine_api import TokenizerResponse
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.public import CallResponse
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import Completion, TokenizedText
from parrot.serve.prompts.encode import ModelTokenizer, TokenizerRegistry, encode_prompt
from parrot.serve.prompts.segments import (
    PieceKind,
    Segment,
    fill_segments,
)
from tests.serve.graph.held_runner import make_graph
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer, tokenizer_id_of
from tests.support.prompts import prompt_segments
from tests.support.requests import given, made, semantic

# The templates of the models, without tools and dates.
LLAMA_3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
TEMPLATES = {"llama-3": LLAMA_3, "qwen": QWEN, "mistral": MISTRAL, "smollm2": SMOLLM2}

SINGLE_TURNS = {
    "What is {{x}}? {{y}}": "What is {x}?",
    "  {{x}}\n{{y}}": "{x}",
    "\nSay:\n{{x}}\n\nBriefly.\n{{y}}": "Say:\n{x}\n\nBriefly.",
    "{{x}}{{y}}": "{x}",
    "Hi {{y}}": "Hi",
}


async def tokenizer_of(response: TokenizerResponse) -> ModelTokenizer:
    registry = TokenizerRegistry()
    id_ = tokenizer_id_of(response)
    await registry.add("m", id_, response)
    tokenizer = registry.get("m", id_)
    assert tokenizer is not None
    return tokenizer


def reference(response: TokenizerResponse) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(response.tokenizer_json),
        bos_token=BOS,
        eos_token=EOS,
        chat_template=response.chat_template,
    )


def messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(texts)
    spoken = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *spoken]


def completions(template: str, answers: Sequence[str], x: str, **fields: Any) -> list[Completion]:
    """Return the completions of a chat call with these answers so far."""
    graph = make_graph()
    names = [name for name in ("y", "z") if f"{{{{{name}}}}}" in template]
    parameters = [*([given("x", x)] if "{{x}}" in template else []), *map(made, names)]
    response = graph.submit(semantic(template, *parameters, chat=True, **fields))
    found = tasks_of(graph, response)[: len(answers) + 1]
    for completion, answer in zip(found, answers, strict=False):
        completion.output.set(answer)
    return found


def tasks_of(graph: SessionGraph, response: CallResponse) -> list[Completion]:
    tasks = graph.calls[response.request_id].tasks
    return [task for task in tasks if isinstance(task, Completion)]


async def prompt_of(completion: Completion, tokenizer: ModelTokenizer | None) -> list[Any]:
    segments = prompt_segments(completion)
    return await encode_prompt(segments, True, tokenizer)


async def text_of(completion: Completion, response: TokenizerResponse) -> str:
    ids = sum(await prompt_of(completion, await tokenizer_of(response)), ())
    tokenizer = Tokenizer.from_str(response.tokenizer_json)
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_one_turn_with_and_without_a_system_message(name: str) -> None:
    response = byte_tokenizer(chat_template=TEMPLATES[name])
    hf = reference(response)
    for template, message in SINGLE_TURNS.items():
        for system in (None, "Be brief."):
            (completion,) = completions(template, [], "a parrot", system=system)
            chat = messages(message.format(x="a parrot"), system=system)
            expected = hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert await text_of(completion, response) == expected, (template, system)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_values_are_stripped_like_by_the_template(name: str) -> None:
    response = byte_tokenizer(chat_template=TEMPLATES[name])
    for template, message in (("{{x}} {{y}}", "{x}"), ("Say {{x}} {{y}}", "Say {x}")):
        (completion,) = completions(template, [], " a line\n")
        chat = messages(message.format(x=" a line\n"))
        expected = reference(response).apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert await text_of(completion, response) == expected


async def test_a_generated_value_that_is_stripped_loses_its_ids() -> None:
    tokenizer = await tokenizer_of(byte_tokenizer(chat_template=LLAMA_3))
    prompts = []
    for text, tokenized in ((" a\n", TokenizedText("t", (1, 2, 3))), ("a", None)):
        value = Segment(PieceKind.VALUE, text, tokenized, ends_turn=True)
        prompts.append(await encode_prompt([value], True, tokenizer))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_two_turns(name: str) -> None:
    """Some templates put a space before an answer that the model generates itself."""
    response = byte_tokenizer(chat_template=TEMPLATES[name])
    generated = " An answer." if name == "mistral" else "An answer."
    _, second = completions("Ask {{x}} {{y}} Why? {{z}}", [generated], "x", system=None)
    chat = messages("Ask x", "An answer.", "Why?")
    hf = reference(response)
    expected = hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert await text_of(second, response) == expected


@pytest.mark.parametrize("name", TEMPLATES)
async def test_the_second_turn_begins_with_the_first_token_for_token(name: str) -> None:
    tokenizer = await tokenizer_of(byte_tokenizer(chat_template=TEMPLATES[name]))
    first, second = completions("Ask {{x}} {{y}} Why? {{z}}", ["A."], "x", system="Be brief.")
    before, after = await prompt_of(first, tokenizer), await prompt_of(second, tokenizer)
    assert after[: len(before)] == before


async def test_the_embedded_model_gets_the_tokens_of_transformers() -> None:
    response = open_checkpoint("embedded").load_tokenizer()
    tokenizer, hf = await tokenizer_of(response), reference(response)
    whole = Tokenizer.from_str(response.tokenizer_json)
    for question in ("What is the capital of France?", "Name a parrot.\nOne word."):
        (completion,) = completions(question + " {{y}}", [], "")
        ids = sum(await prompt_of(completion, tokenizer), ())
        text = hf.apply_chat_template(
            messages(question), tokenize=False, add_generation_prompt=True
        )
        assert list(ids) == whole.encode(text).ids


async def test_engines_without_a_tokenizer_get_the_texts() -> None:
    (completion,) = completions(" Hi {{x}} {{y}}", [], "all", system="Be brief.")
    assert "".join(await prompt_of(completion, None)) == "Be brief.\n\nHi all"


async def test_the_error_of_a_model_without_a_system_role() -> None:
    response = byte_tokenizer(chat_template=GEMMA)
    (completion,) = completions("Hi {{y}}", [], "")
    assert "<start_of_turn>user\nHi<end_of_turn>" in await text_of(completion, response)
    (completion,) = completions("Hi {{y}}", [], "", system="Be brief.")
    with pytest.raises(InvalidRequest, match="System role not supported"):
        await text_of(completion, response)


def test_a_system_message_is_allowed_only_at_the_beginning() -> None:
    graph = make_graph()
    with pytest.raises(InvalidRequest, match="needs `chat: true`"):
        graph.submit(semantic("Hi {{y}}", made("y"), system="Be brief."))
    first = graph.submit(semantic("Hi {{y}}", made("y"), chat=True, system="Be brief."))
    with pytest.raises(InvalidRequest, match="first call of a chat"):
        graph.submit(
            semantic("And {{y}}", made("y"), chat=True, system="!", successor_of=first.request_id)
        )


def test_a_text_before_the_first_turn_keeps_its_system_message() -> None:
    graph = make_graph()
    start = graph.submit(semantic("Hello. ", chat=True, system="Be brief.", remove_pure_fill=False))
    request = semantic("Who? {{y}}", made("y"), chat=True, successor_of=start.request_id)
    (task,) = tasks_of(graph, graph.submit(request))
    assert [segment.text for segment in fill_segments(task)] == ["Be brief.", "Hello. ", "Who?"]
