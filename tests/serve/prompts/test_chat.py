"""Chat templates are converted to constant markup, so that messages are never rendered."""

import gc
from time import thread_time

import pytest

from parrot.protocol.errors import InvalidRequest
from parrot.serve.prompts.templates import ModelTemplate
from tests.support.byte_tokenizer import CHATML

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{{ m['content'] | trim }} [/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def test_markup() -> None:
    user, assistant = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    template = ModelTemplate(CHATML)
    assert template.markup(1) == (user, assistant)
    assert template.markup(2) == (user, assistant, "<|im_end|>\n" + user, assistant)
    later = ("<|im_end|>\n" + user, assistant)
    assert template.markup(3, has_system=True) == (
        "<|im_start|>system\n",
        "<|im_end|>\n" + user,
        assistant,
        *later,
        *later,
    )
    assert template.markup(40) == (user, assistant, *later * 39)


def test_tokens_and_filters() -> None:
    assert ModelTemplate(LLAMA, "<s>", "</s>").markup(2) == (
        "<s>[INST] ",
        " [/INST]",  # without the space that the template inserts before earlier answers
        "</s>[INST] ",
        " [/INST]",
    )


def test_turns_may_differ_in_their_markup() -> None:
    template = ModelTemplate("{% for m in messages %}({{ loop.index }}){{ m.content }}{% endfor %}")
    assert template.markup(3) == ("(1)", "", "(3)", "", "(5)", "")
    # From the 16th turn on, all turns are equal.
    assert template.markup(20)[30:] == ("(31)", "") * 5


def test_whether_messages_are_stripped() -> None:
    assert ModelTemplate(LLAMA).strips
    assert not ModelTemplate(CHATML).strips


def test_features_of_real_templates() -> None:
    template = ModelTemplate(
        "{%- if not messages %}{{ raise_exception('empty') }}{% endif %}"
        "{{ strftime_now('%Y') | length }}{{ {'a': 1} | tojson }}"
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
        "{%- generation %}{{ m.content }}{% endgeneration -%}{% endfor %}"
    )
    assert template.markup(1) == ('4{"a": 1}', "")


@pytest.mark.parametrize(
    "template",
    [
        "nothing shown",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('only one turn') }}",
        "{{ messages[99].content.x.y }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_that_cannot_be_used(template: str) -> None:
    with pytest.raises(InvalidRequest):
        ModelTemplate(template).markup(2)


def test_broken_template() -> None:
    with pytest.raises(InvalidRequest):
        ModelTemplate("{% for")


def test_a_garbage_collection_uses_no_budget_of_a_template() -> None:
    """A garbage collection of a large process takes longer than the time budget of a template."""

    def collect_slowly(phase: str, info: dict[str, int]) -> None:
        end = thread_time() + 0.01
        while thread_time() < end:
            pass

    template = ModelTemplate("{% for n in range(200) %}{{ [n] }}{% endfor %}" + CHATML)
    thresholds = gc.get_threshold()
    gc.callbacks.append(collect_slowly)
    gc.set_threshold(1)
    try:
        assert template.render([{"role": "user", "content": "Hi"}]).endswith("assistant\n")
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collect_slowly)
