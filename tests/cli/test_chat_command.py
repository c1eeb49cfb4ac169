"""`pagedkv chat`: what is typed, what is said, and what is remembered."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from serving import http_server

from pagedkv.cli.chat import Conversation, describe
from pagedkv.cli.main import run
from pagedkv.cli.speakers import Message, Show, Style
from pagedkv.errors import RequestError
from pagedkv.loadtest.answer import Answer


class Scripted:
    """Says what it was asked last, backwards; is interrupted, or fails, when asked to."""

    name = "scripted"

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []

    def answer(self, messages: Sequence[Message], style: Style, show: Show) -> Answer:
        self.heard.append(list(messages))
        asked = messages[-1]["content"]
        if asked == "fail":
            raise RequestError("the prompt is too long")
        show(asked[::-1][:2])
        if asked == "wait":
            raise KeyboardInterrupt
        show(asked[::-1][2:])
        return Answer([0.1, 0.6], 20, 6, 15, asked[::-1], None)

    def close(self) -> None: ...


class Talk:
    def __init__(self, system: str | None = None) -> None:
        self.speaker, self.shown = Scripted(), io.StringIO()
        console = Console(file=self.shown, width=200)
        self.conversation = Conversation(self.speaker, Style(), console, system)

    def say(self, *lines: str) -> list[bool]:
        return [self.conversation.take(line) for line in lines]


def said(*texts: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_conversation_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk()
    assert talk.say("abc\n", "  def", "\n") == [True] * 3
    assert talk.speaker.heard[1] == said("abc", "cba", "def")
    assert talk.conversation.messages == said("abc", "cba", "def", "fed")
    assert capsys.readouterr().out == "cba\nfed\n"
    line = "20 prompt tokens, 15 cached (75%) · first token 100 ms · 6 tokens · 10.0 tokens/s"
    assert talk.shown.getvalue().splitlines() == [line, line]


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = Talk()
    assert talk.say("wait", "abc") == [True, True]
    assert talk.conversation.messages == said("wait", "ti", "abc", "cba")
    assert "stopped" in talk.shown.getvalue()
    assert talk.conversation.num_failed == 0
    assert capsys.readouterr().out == "ti\ncba\n"


def test_a_message_that_fails_is_forgotten() -> None:
    talk = Talk()
    talk.say("abc", "fail", "def")
    assert talk.conversation.messages == said("abc", "cba", "def", "fed")
    assert "the prompt is too long" in talk.shown.getvalue()
    assert talk.conversation.num_failed == 1


def test_the_system_prompt_survives_a_reset() -> None:
    talk = Talk("be brief")
    talk.say("abc", "/reset", "def")
    assert talk.speaker.heard[1] == [{"role": "system", "content": "be brief"}, *said("def")]
    talk.say("/system be long", "/system")
    assert talk.conversation.messages == said("def", "fed")


def test_commands(tmp_path: Path) -> None:
    talk = Talk()
    path = tmp_path / "talk.json"
    assert talk.say("/help", "a\u00e9", f"/save {path}", "/nothing", "/save /none/x") == [True] * 5
    assert json.loads(path.read_text("utf-8")) == {
        "model": "scripted",
        "messages": said("a\u00e9", "\u00e9a"),
    }
    shown = talk.shown.getvalue()
    assert "/system TEXT" in shown
    assert f"2 messages written to {path}" in shown
    assert "'/nothing' is no command" in shown
    assert "/none/x cannot be written" in shown
    assert talk.say("/quit") == [False]
    assert talk.say(" /quit") == [True]  # a message
    assert talk.speaker.heard[-1][-1]["content"] == "/quit"


def test_a_line_on_what_an_answer_took() -> None:
    assert describe(Answer([], 3, 0)) == "3 prompt tokens · 0 tokens"
    assert describe(Answer([0.2], 3, 1)) == "3 prompt tokens · first token 200 ms · 1 tokens"


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_server_answers_what_is_piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "a\nb\n/quit\nnever\n")
    with http_server() as url:
        args = ["chat", "--url", url, "--max-tokens", "4", "--temperature", "0"]
        assert run(args) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") >= 2
    first, second = shown.err.splitlines()
    assert "4 tokens" in first and "cached" not in first
    assert "cached" in second  # the first turn is the beginning of the second


def test_a_server_that_refuses_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as url:
        assert run(["chat", "--url", url, "x" * 200]) == 1
    assert "max_model_len" in capsys.readouterr().err


def test_a_model_in_this_process(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["chat", "--model", model, "--max-tokens", "20", "--temperature", "0", "one", "two"]
    assert run(args) == 0
    shown = capsys.readouterr()
    assert len(shown.out) > 2
    first, second = shown.err.splitlines()
    assert "20 tokens" in first and "first token" in first
    assert "cached" in second


def test_a_server_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--url", "http://127.0.0.1:9", "hello"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert run(["chat", "--url", "nonsense", "hello"]) == 2
    assert "no server answers at nonsense" in capsys.readouterr().err
