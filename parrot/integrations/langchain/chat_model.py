"""A LangChain chat model whose answers are semantic variables."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from parrot.frontend.pfunc.call import SemanticCall
from parrot.frontend.pfunc.function import Parameter, ParamType, SemanticFunction
from parrot.frontend.pfunc.semantic_variable import SemanticVariable
from parrot.integrations.langchain.messages import (
    FixedMessage,
    LazyAIMessage,
    Part,
    answer_fields,
    parts_of,
)
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import TemplateText, parse_template, placeholder

_OUTPUT = "answer"
_OWN_NAMES = {"max_tokens": "max_gen_length", "stop": "stop_str"}


class ChatParrot(BaseChatModel):
    """A chat model of the current session (`P.VirtualMachine.running_scope`).

    `invoke`, `batch`, `map` and chains submit a call and return a lazy message: its text is fetched
    on first access. A prompt that contains lazy messages refers to their variables. Streams wait
    for the text, and so do calls with callbacks, tracing or a cache.

    A prompt is an optional system message and at least one human message. A call accepts `stop`,
    the fields of this class and the fields of `P.SamplingConfig` as options."""

    model: str | None = None
    """The model's name. None: any model of the service."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None

    @property
    def _llm_type(self) -> str:
        return "parrot"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"model": self.model, **self._options()}

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Submit a call and return when ServeCore has accepted it, before it runs. Inside
        `vm.batch()` it returns at once."""
        if self._is_observed(config):
            return super().invoke(input, config, stop=stop, **kwargs)
        messages = self._convert_input(input).to_messages()
        return LazyAIMessage.of([self._submit(messages, stop, kwargs)])

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """As `invoke`. In async code, get the text with `await message.aget()` or `fetch`."""
        if self._is_observed(config):
            return await super().ainvoke(input, config, stop=stop, **kwargs)
        messages = self._convert_input(input).to_messages()
        return LazyAIMessage.of([await self._asubmit(messages, stop, kwargs)])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        variable = self._submit(messages, stop, kwargs)
        variable.get()
        return _result(variable)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        variable = await self._asubmit(messages, stop, kwargs)
        await variable.aget()
        return _result(variable)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        variable = self._submit(messages, stop, kwargs)
        for piece in variable.stream():
            chunk = _chunk(piece)
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last_chunk(variable)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        variable = await self._asubmit(messages, stop, kwargs)
        async for piece in variable.astream():
            chunk = _chunk(piece)
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last_chunk(variable)

    def _is_observed(self, config: RunnableConfig | None) -> bool:
        """Whether a rate limiter, a cache or a callback takes part in the call. Then LangChain's
        own `invoke` runs, which waits for the text."""
        if self.rate_limiter is not None or self.cache:
            return True
        if self.cache is None and get_llm_cache() is not None:
            return True
        callbacks = ensure_config(config).get("callbacks")
        return bool(CallbackManager.configure(callbacks, self.callbacks, self.verbose).handlers)

    def _submit(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> SemanticVariable:
        function, values = self._call(messages, stop, options)
        return _submitted(function.invoke(**values))

    async def _asubmit(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> SemanticVariable:
        function, values = self._call(messages, stop, options)
        return _submitted(await function.ainvoke(**values))

    def _call(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> tuple[SemanticFunction, dict[str, str | SemanticVariable]]:
        system, parts = _prompt(messages)
        template, values = _template(parts)
        params = [Parameter(name, ParamType.INPUT_LOC) for name in values]
        sampling = self._sampling(options if stop is None else {**options, "stop": stop})
        params.append(Parameter(_OUTPUT, ParamType.OUTPUT_LOC, sampling))
        models = () if self.model is None else (self.model,)
        function = SemanticFunction("chat", params, template + placeholder(_OUTPUT), models=models)
        return function.with_metadata(chat=True, system=system), values

    def _options(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "max_tokens", "seed", "stop")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _sampling(self, options: dict[str, Any]) -> SamplingConfig:
        """Raises `TypeError` for an unknown option, and `ValueError` for a wrong value."""
        fields = {
            _OWN_NAMES.get(name, name): value
            for name, value in (self._options() | options).items()
            if value is not None
        }
        if unknown := fields.keys() - SamplingConfig.model_fields.keys():
            raise TypeError(f"ChatParrot has no option `{min(unknown)}`")
        return SamplingConfig.model_validate(fields)


def _prompt(messages: Sequence[BaseMessage]) -> tuple[str | None, list[Part]]:
    """The system message, and the parts of all human messages."""
    system = None
    if messages and isinstance(messages[0], SystemMessage):
        system = str(messages[0].text)
        messages = messages[1:]
    parts: list[Part] = []
    for message in messages:
        if not isinstance(message, HumanMessage):
            raise InvalidRequest(
                "ChatParrot accepts a system message and human messages after it, but no "
                f"`{message.type}` message there; for conversations use ChatOpenAI with the same "
                "server's base_url",
                param="messages",
            )
        if parts:
            parts.append("\n\n")
        parts += parts_of(message)
    if not parts:
        raise InvalidRequest("the prompt has no human message", param="messages")
    return system, parts


def _template(parts: Sequence[Part]) -> tuple[str, dict[str, str | SemanticVariable]]:
    """A semantic function's template, and the values of its inputs. Text that contains a
    placeholder is passed as a value, so the placeholder stays plain text."""
    template = ""
    values: dict[str, str | SemanticVariable] = {}
    for part in parts:
        if isinstance(part, FixedMessage):
            if all(isinstance(piece, TemplateText) for piece in parse_template(part.text)):
                template += part.text
                continue
            part = part.text
        name = f"part_{len(values)}"
        values[name] = part
        template += placeholder(name)
    return template, values


def _submitted(returned: SemanticVariable | SemanticCall) -> SemanticVariable:
    if isinstance(returned, SemanticVariable):
        return returned
    raise InvalidRequest(
        "ChatParrot has no session: use it inside vm.running_scope(), or after vm.set_global_env()"
    )


def _result(variable: SemanticVariable) -> ChatResult:
    message = AIMessage(**answer_fields(variable))
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def _last_chunk(variable: SemanticVariable) -> ChatGenerationChunk:
    """The last chunk of a stream: finish reason and token usage, without text."""
    fields = answer_fields(variable) | {"content": ""}
    return ChatGenerationChunk(message=AIMessageChunk(**fields))
