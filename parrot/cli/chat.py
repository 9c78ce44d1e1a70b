"""`parrot chat`: a conversation with a model through the OpenAI-compatible API."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from rich.markup import escape

from parrot.cli.coding_agents import SMALL_MODEL
from parrot.cli.console import ERR, OUT, fail
from parrot.cli.page_feed import RemoteServer, RequestFailed
from parrot.cli.run import host_and_port
from parrot.cli.word_wrap import WordWrap

_FORGET = "/new"
_HELP = "/help"
_UNSEEN = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which a text could change other parts of the screen."""
_LEAVE = ("/exit", "/quit")
_COMMAND = re.compile(r"/\w*")
_COMMANDS = """\
/new     start a new chat
/help    list the commands
/exit    leave, as /quit and Ctrl-D do
Ctrl-C   stop the answer"""
_TOY = (
    "The included model `embedded` is a toy with 135M parameters, and many of its answers are "
    f"wrong. To try a better one, run: parrot up {SMALL_MODEL}"
)


class AnswerPiece(NamedTuple):
    """A chunk of an answer. `is_cut`: the answer was cut here at its maximum length."""

    text: str
    is_cut: bool


class Chat:
    """The turns so far. Each request contains all of them."""

    def __init__(
        self, server: RemoteServer, model: str, system: str | None, options: dict[str, Any]
    ):
        self._server = server
        self.model = model
        self.max_tokens = options["max_tokens"]
        self._options = options
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)

    def forget(self) -> None:
        self._messages = list(self._first)

    def turn(self, text: str) -> Iterator[AnswerPiece]:
        """Yield the answer in chunks. A turn that fails or is not read completely is not added to
        the chat. Raises `RequestFailed`."""
        messages = [*self._messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        pieces: list[str] = []
        for data in self._server.events("POST", "/v1/chat/completions", body):
            if data == "[DONE]":
                answer = {"role": "assistant", "content": "".join(pieces)}
                self._messages = [*messages, answer]
                return
            piece = _piece(data)
            pieces.append(piece.text)
            yield piece
        raise RequestFailed("the answer broke off; send the message again")


def chat(
    core: str,
    model: str | None,
    question: str | None,
    system: str | None,
    api_key: str | None,
    max_tokens: int,
    temperature: float | None,
) -> None:
    """Chat until the end of the input, or ask one `question`. Raises `SystemExit` on failure."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    server = RemoteServer(*host_and_port(core), headers)
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    try:
        conversation = Chat(server, _chosen(server, model), system, options)
        if conversation.model == "embedded":
            ERR.print(f"[yellow]{_TOY}[/]")
        if question is not None:
            _answer(conversation, question)
            return
    except RequestFailed as error:
        fail(_with_advice(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    _talk(conversation, core)


def _talk(conversation: Chat, core: str) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # Line editing and history for `input`.

        OUT.print(
            f"[bold]{escape(conversation.model)}[/] at {core}. {_FORGET} starts a new chat, "
            f"{_HELP} lists the commands, Ctrl-C stops the answer, Ctrl-D leaves."
        )
    failed = False
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if text in _LEAVE:
            break
        if text == _FORGET:
            conversation.forget()
        elif text == _HELP:
            OUT.print(_COMMANDS)
        elif _COMMAND.fullmatch(text):
            ERR.print(f"[yellow]Unknown command {text}. {_HELP} lists the commands.[/]")
        elif text:
            try:
                _answer(conversation, text)
            except RequestFailed as error:
                failed = True
                ERR.print(f"[bold red]error:[/] {escape(_with_advice(error))}", soft_wrap=True)
            except KeyboardInterrupt:
                ERR.print("\n[yellow](stopped; this answer was discarded)[/]")
    if is_terminal:
        OUT.print()
    sys.exit(1 if failed and not is_terminal else 0)


def _answer(conversation: Chat, text: str) -> None:
    wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    is_cut = False
    pieces = conversation.turn(text)
    with ERR.status("The model reads the prompt …"):  # On a terminal only.
        first = list(_to_first_text(pieces))
    for piece in chain(first, pieces):
        shown = piece.text.translate(_UNSEEN)
        _write(shown if wrap is None else wrap.feed(shown))
        is_cut |= piece.is_cut
    _write("\n" if wrap is None else wrap.end() + "\n")
    if is_cut:
        ERR.print(
            f"[yellow](The answer reached its maximum length. --max-tokens is "
            f"{conversation.max_tokens}.)[/]"
        )


def _to_first_text(pieces: Iterator[AnswerPiece]) -> Iterator[AnswerPiece]:
    for piece in pieces:
        yield piece
        if piece.text:
            return


def _write(text: str) -> None:
    sys.stdout.write(text)  # rich would write it only at the end of the line.
    sys.stdout.flush()


def _piece(data: str) -> AnswerPiece:
    """The text in a chunk. Raises `RequestFailed` if the chunk is an error."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise RequestFailed(str(chunk["error"]["message"]))
        if not chunk["choices"]:
            return AnswerPiece("", is_cut=False)
        choice = chunk["choices"][0]
        is_cut = choice.get("finish_reason") == "length"
        return AnswerPiece(choice["delta"].get("content") or "", is_cut)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise RequestFailed(f"the answer is not in OpenAI's format: {data:.80}") from None


def _chosen(server: RemoteServer, model: str | None) -> str:
    """The model, or the first model of the server. Raises `RequestFailed`."""
    answer, _ = server.ask("GET", "/v1/models")
    try:
        served = [str(card["id"]) for card in answer["data"]]
    except (KeyError, TypeError):
        raise RequestFailed("this is not a server with OpenAI's API") from None
    if model is None and served:
        return served[0]
    if not served:
        raise RequestFailed("no model is served yet; `parrot top` shows the engines")
    if model not in served:
        raise RequestFailed(f"{model} is not served; --model may be {', '.join(served)}")
    return model


def _with_advice(error: RequestFailed) -> str:
    if error.status == 401:
        return f"{error}. Give one of its `api_keys`: --api-key, or PARROT_KEY in the environment"
    return str(error)
