"""`pagedkv chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagedkv.cli.main import FAILED
from pagedkv.cli.terminal import printable
from pagedkv.errors import PagedKVError, RequestError

if TYPE_CHECKING:  # what they need is in the extra `server`
    from pagedkv.cli.speakers import Message, Speaker, Style
    from pagedkv.loadtest.answer import Answer

_URL = "http://127.0.0.1:8000"
_HELP = """\
/system TEXT  what the model is told before all else; without TEXT: nothing
/reset        forget the conversation, but not that
/save FILE    write it as JSON
/quit         leave; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with / takes a space before it."""


def chat(
    messages: Annotated[
        list[str] | None,
        typer.Argument(help="Say this, and leave after the answers.", metavar="TEXT"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help=f"Of a server. Default: {_URL}.", metavar="URL")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of the server.", envvar="PAGEDKV_API_KEY", metavar="TEXT")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Without --url: embedded model, folder, or hub id, in this process. With it: "
            "which of the server's models.",
            metavar="TEXT",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before all else.", metavar="TEXT")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", metavar="INTEGER")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", metavar="NUMBER")] = 0.7,
) -> int:
    """Chat with a server, or with a model in this process. /help says what can be typed."""
    from pagedkv.cli.speakers import Here, Server, Style

    console = Console(stderr=True, highlight=False)
    speaker: Speaker
    if model is not None and url is None:
        from pagedkv.engine.llm import LLM

        logging.getLogger("pagedkv").addHandler(logging.NullHandler())
        speaker = Here(LLM(model), model)
    else:
        speaker = Server(url or _URL, api_key, model)
    with closing(speaker):
        conversation = Conversation(speaker, Style(max_tokens, temperature), console, system)
        if messages:
            lines: Iterable[str] = messages
        else:
            lines = _typed(console, f"{speaker.name}: /help says what can be typed")
        for line in lines:
            if not conversation.take(line):
                break
    alone = bool(messages) or sys.stdin is None or not sys.stdin.isatty()
    return FAILED if alone and conversation.num_failed else 0


class Conversation:
    """Messages so far, and what becomes of each line that is typed.

    Answers go to stdout, all else to `console`. A message that gets no answer is forgotten.
    """

    def __init__(
        self, speaker: Speaker, style: Style, console: Console, system: str | None = None
    ) -> None:
        self._speaker, self._style, self._console = speaker, style, console
        self._system = system
        self._said: list[Message] = []
        self.num_failed = 0

    @property
    def messages(self) -> list[Message]:
        """All that the next answer is an answer to."""
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        return first + self._said

    def take(self, line: str) -> bool:
        """A message or a command; False: it was the last one."""
        if not line.startswith("/"):
            if line.strip():
                self._say(line.strip())
            return True
        command, _, rest = line[1:].strip().partition(" ")
        match command, rest.strip():
            case "quit" | "exit", "":
                return False
            case "help", "":
                self._console.print(_HELP)
            case "reset", "":
                self._said.clear()
                self._note("forgotten")
            case "system", text:
                self._system = text or None
            case "save", file if file:
                self._save(Path(file))
            case _:
                self._warn(f"{line.strip()!r} is no command: /help says what can be typed")
        return True

    def _say(self, text: str) -> None:
        said: list[str] = []
        messages = [*self.messages, {"role": "user", "content": text}]

        def show(piece: str) -> None:
            said.append(piece)
            sys.stdout.write(printable(piece))
            sys.stdout.flush()

        answer: Answer | None = None
        why: str | None = None
        try:
            answer = self._speaker.answer(messages, self._style, show)
            why = answer.error
        except KeyboardInterrupt:
            why = "stopped"
        except PagedKVError as error:
            why, self.num_failed = str(error), self.num_failed + 1
        if said:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if why is not None:
            self._warn(why)
        if answer is not None:
            self.num_failed += answer.error is not None
            self._note(describe(answer))
        if answer is not None or any(said):
            self._said = messages[len(messages) - len(self._said) - 1 :]
            self._said.append({"role": "assistant", "content": "".join(said)})

    def _save(self, path: Path) -> None:
        content = {"model": self._speaker.name, "messages": self.messages}
        try:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except (OSError, UnicodeError, ValueError) as error:
            self._warn(f"{path} cannot be written: {error}")
        else:
            self._note(f"{len(self.messages):,} messages written to {path}")

    def _note(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, soft_wrap=True)

    def _warn(self, line: str) -> None:
        self._console.print(line, style="yellow", markup=False, soft_wrap=True)


def describe(answer: Answer) -> str:
    """What an answer took, in a line: prefix hits, time to first token, tokens a second."""
    parts = [f"{answer.prompt_tokens:,} prompt tokens"]
    if answer.cached_tokens:
        share = answer.cached_tokens / max(1, answer.prompt_tokens)
        parts[0] += f", {answer.cached_tokens:,} cached ({share:.0%})"
    if answer.times:
        parts.append(f"first token {answer.times[0] * 1e3:,.0f} ms")
    parts.append(f"{answer.output_tokens:,} tokens")
    seconds = answer.times[-1] - answer.times[0] if answer.times else 0.0
    if seconds > 0:
        parts.append(f"{(answer.output_tokens - 1) / seconds:,.1f} tokens/s")
    return " · ".join(parts)


def _typed(console: Console, greeting: str) -> Iterator[str]:
    """Lines of a terminal, with its editing, or of what is piped into us."""
    if sys.stdin is None or not sys.stdin.isatty():
        try:
            yield from () if sys.stdin is None else sys.stdin
        except UnicodeDecodeError as error:
            raise RequestError(f"stdin is not UTF-8 text: {error}") from error
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its editing and history)
    console.print(greeting, style="dim", markup=False)
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\nto leave: Ctrl-D or /quit", style="dim")
            continue
        yield line
