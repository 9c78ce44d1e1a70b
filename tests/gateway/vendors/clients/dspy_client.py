"""DSPy, which uses LiteLLM as its client."""

import dspy
from features import CAPITAL, KEY, MODEL, URL, feature, raises, run


def lm(name=MODEL, **fields):
    given = {"api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 200, "num_retries": 0}
    return dspy.LM(f"openai/{name}", cache=False, temperature=0, **given | fields)


@feature("chat")
def a_chat():
    with dspy.context(lm=lm()):
        assert dspy.Predict("question -> answer")(question=CAPITAL).answer == "Paris"
    assert "Paris" in lm()(CAPITAL)[0]


@feature("stream")
def streams():
    program = dspy.streamify(
        dspy.Predict("question -> answer"),
        stream_listeners=[dspy.streaming.StreamListener(signature_field_name="answer")],
        async_streaming=False,
    )
    with dspy.context(lm=lm()):
        chunks = list(program(question=CAPITAL))
    assert chunks[-1].answer == "Paris"


@feature("completions")
def completions():
    text = dspy.LM(
        f"text-completion-openai/{MODEL}",
        model_type="text",
        api_base=f"{URL}/v1",
        api_key=KEY,
        max_tokens=9,
        cache=False,
    )
    assert text(CAPITAL)[0]


@feature("errors")
def errors():
    raises(Exception, lambda: lm("nope")("Hi"), "nope")


if __name__ == "__main__":
    run("dspy", "litellm")
