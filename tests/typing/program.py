"""A program for type checkers (.ci/run). mypy and pyright must find exactly the errors that
comments on the lines name."""

from typing import Annotated, Any, Literal, assert_type

from pydantic import BaseModel

from parrot import P


class Person(BaseModel):
    name: str
    age: int


@P.semantic_function()
def tell(topic: P.Input, style: str = "old") -> P.Returns[str]:
    """Tell a joke about {{topic}} in the style {{style}}: {{joke}}"""


@P.semantic_function(models=["m"])
def rate(joke: P.Input) -> Annotated[P.Returns[Literal["good", "bad"]], P.SamplingConfig(seed=1)]:
    """{{joke}} This is {{rating}}"""


@P.semantic_function()
def people(text: P.Input) -> P.Returns[list[Person]]:
    """{{text}} As JSON: {{people}}"""


@P.semantic_function()
def describe(text: P.Input, limit: int) -> P.Returns[tuple[str, Person]]:
    """{{text}} In {{limit}} words: {{summary}} As JSON: {{person}}"""


@P.semantic_function()
def earlier(
    joke: Annotated[str, P.Input],
    why: Annotated[str, P.Output(P.SamplingConfig(max_gen_length=8))],
    language: str = "English",
) -> None:
    """{{joke}} In {{language}}, this is funny since {{why}}"""


@P.native_function()
def shorten(text: Annotated[str, P.Input], short: Annotated[P.SemanticVariable, P.Output]) -> None:
    short.set(text[:10])


@P.tool
def weather(city: str, days: int = 1) -> list[str]:
    """The weather of a city."""
    return [city] * days


@P.tool(name="clock")
async def now() -> str:
    """The time."""
    return "12:34"


async def tools(topic: str) -> None:
    assert_type(weather("Oslo", days=2), list[str])
    assert_type(await now(), str)
    weather(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    agent = P.Agent([weather, now], "Be brief.")
    run = agent.stream(topic)
    for piece in run:
        assert_type(piece, str)
    async for piece in agent.stream(topic):
        assert_type(piece, str)
    assert_type((await agent.arun(topic, after=run)).text, str)
    assert_type(run.calls[0].error, Exception | None)


def options() -> None:
    surer = tell.with_options(retries=2, fallback=rate, models=["m"])
    assert_type(surer("x", style="new").get(), str)
    surer("x", 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def calls(topic: str) -> None:
    joke = tell(topic, style="new")
    assert_type(joke, P.SemanticVariable[str])
    assert_type(joke.get(), str)
    assert_type(rate(joke).get(timeout=3.0), Literal["good", "bad"])
    assert_type(people("text").get(), list[Person])
    summary, person = describe(joke, limit=3)
    assert_type(summary.get(), str)
    assert_type(person.get().age, int)
    for piece in joke.stream():
        assert_type(piece, str)
    why: P.SemanticVariable = earlier(joke, language="French")
    assert_type(why.name, str)
    assert_type(shorten(joke), Any)


def mistakes() -> None:
    tell()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tell("x", "old", "more")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tell("x", stile="old")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    tell("x", style=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    describe("x", limit="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tell("x").got()  # type: ignore[attr-defined]  # pyright: ignore
    people("x").get().strip()  # type: ignore[attr-defined]  # pyright: ignore


def many(topics: list[str]) -> None:
    jokes = vm.map(tell, topics, style="old")
    assert_type(jokes, list[P.SemanticVariable[str]])
    assert_type(P.gather(jokes, progress="Jokes"), list[str])
    outcomes = P.gather(jokes, return_exceptions=True)
    assert_type(outcomes, list[str | P.errors.ParrotError])
    pairs = P.gather(vm.map(describe, topics, limit=3))
    assert_type(pairs, list[tuple[str, Person]])
    assert_type(P.any_of(jokes).get(), str)
    for joke in P.as_completed(jokes):
        assert_type(joke.get(), str)


async def awaited(topic: str) -> None:
    person = (await describe.ainvoke(topic, limit=3))[1]
    assert_type(await person.aget(), Person)
    assert_type(await person, Person)
    jokes = await vm.amap(tell, [topic])
    assert_type(await P.agather(jokes), list[str])
    async for joke in P.aas_completed(jokes):
        assert_type(await joke, str)


vm = P.VirtualMachine("http://localhost:9000")
if __name__ == "__main__":
    assert_type(vm.run(calls, args=["parrots"], report=True), float)
