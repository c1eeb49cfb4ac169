"""What a tenant can learn of others, and who is let in: over HTTP, on the toy model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from serving import MODEL, http_server, toy_core
from serving import settings as server_settings
from tiny_llm import VOCAB, byte_tokenizer

import pagedkv
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.step import Result, Step, Ticket
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "default": "key-of-the-operator"}
PROMPT = "the same words for all who ask for them"
BLOCK_SIZE = 4


@dataclass
class CountingExecutor:
    """The toy model, and what each step has computed."""

    inner: ToyExecutor = field(
        default_factory=lambda: ToyExecutor(64, BLOCK_SIZE, vocab_size=VOCAB)
    )
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def submit(self, step: Step) -> Ticket:
        self.steps.append((step.query_lens.tolist(), step.context_lens.tolist()))
        return self.inner.submit(step)

    def collect(self, ticket: Ticket) -> Result:
        return self.inner.collect(ticket)


@dataclass
class Server:
    """A server with keys of two tenants and of the operator."""

    url: str
    executor: CountingExecutor
    apps: list[FastAPI]

    def ask(
        self, who: str, prompt: str = PROMPT, chat: bool = False, **fields: Any
    ) -> httpx.Response:
        body = {"model": MODEL, "max_tokens": 4, "temperature": 0, **fields}
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = "/v1/chat/completions" if chat else "/v1/completions"
        headers = {"Authorization": f"Bearer {KEYS[who]}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def cost(self, who: str, **given: Any) -> Cost:
        """What a request makes the executor compute, and what its answer says of it."""
        before = len(self.executor.steps)
        answer = self.ask(who, **given)
        assert answer.status_code == 200, answer.text
        steps = self.executor.steps[before:]
        usage = answer.json()["usage"]
        return Cost(steps, usage["prompt_tokens_details"]["cached_tokens"], answer.json())


@dataclass
class Cost:
    steps: list[tuple[list[int], list[int]]]
    cached: int
    answer: Any

    @property
    def computed(self) -> int:
        return sum(sum(query_lens) for query_lens, _ in self.steps)


@contextmanager
def server(**settings: Any) -> Iterator[Server]:
    executor, apps = CountingExecutor(), []

    def make() -> EngineCore:
        return toy_core(executor=executor, block_size=BLOCK_SIZE, **settings)

    given = server_settings({key: tenant for tenant, key in KEYS.items()})

    def make_app(engine: AsyncEngine) -> FastAPI:
        apps.append(create_app(engine, given))
        return apps[0]

    with http_server(make, make_app) as url:
        yield Server(url, executor, apps)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("salt", [None, "s"], ids=["plain", "salted"])
def test_whether_another_has_asked_the_same_cannot_be_told(chat: bool, salt: str | None) -> None:
    given = {"chat": chat} | ({} if salt is None else {"cache_salt": salt})
    with server() as alone:
        want = alone.cost("bob", **given)
    with server() as shared:
        first = shared.cost("alice", **given)
        got = shared.cost("bob", **given)
        again = shared.cost("bob", **given)
    assert (got.steps, got.cached) == (want.steps, want.cached) == (first.steps, 0)
    assert got.answer["choices"] == want.answer["choices"]
    # The control: one's own prompt is found.
    assert again.cached > 0 and again.computed < got.computed


def test_the_operators_key_shares_with_no_tenant_either() -> None:
    with server() as running:
        first = running.cost("default")
        assert running.cost("alice").steps == first.steps


def test_a_salt_narrows_what_its_tenant_shares() -> None:
    with server() as running:
        cold = running.cost("alice", cache_salt="one")
        assert running.cost("alice", cache_salt="two").steps == cold.steps
        assert running.cost("alice").steps == cold.steps
        assert running.cost("alice", cache_salt="one").cached > 0
        # A salt that others know opens nothing.
        assert running.cost("bob", cache_salt="one").steps == cold.steps


def test_salt_and_tenant_are_not_run_together() -> None:
    given = server_settings({"k1": "ab", "k2": "a"})
    executor = CountingExecutor()

    def ask(url: str, key: str, salt: str) -> int:
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
        before = len(executor.steps)
        answer = httpx.post(
            f"{url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60
        )
        assert answer.status_code == 200
        return sum(sum(lens) for lens, _ in executor.steps[before:])

    with http_server(
        lambda: toy_core(executor=executor), lambda engine: create_app(engine, given)
    ) as url:
        assert ask(url, "k1", "c") == ask(url, "k2", "bc")


def test_a_public_prefix_is_shared_and_nothing_beyond_it() -> None:
    public = PROMPT[:18]  # four blocks of four tokens, and two tokens
    shared = len(public) // BLOCK_SIZE * BLOCK_SIZE
    with server(public_prefixes=(tuple(byte_tokenizer().encode(public)),)) as running:
        cold = running.cost("alice")
        assert cold.cached == 0
        assert running.cost("bob").cached == shared
        assert running.cost("default", prompt=public + " and other words").cached == shared
        assert running.cost("bob", prompt=PROMPT).cached > shared  # bob's own by now
        # What begins otherwise, or with a part of it alone, is not public.
        other = PROMPT[:17] + "-" + PROMPT[18:]
        running.cost("alice", prompt=other)
        assert running.cost("bob", prompt=other).cached == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "alice"},
        {"namespace": "alice"},
        {"public": 100},
        {"public_prefixes": [PROMPT]},
        {"weight": 100},
        {"extra_body": {"tenant": "alice"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_body_cannot_name_a_tenant_or_what_only_the_operator_sets(
    fields: dict[str, Any],
) -> None:
    with server() as running:
        for chat in (False, True):
            answer = running.ask("bob", chat=chat, **fields)
            assert answer.status_code == 400
            assert next(iter(fields)) in answer.json()["error"]["message"]
        assert not running.executor.steps


def test_nothing_else_that_a_client_sends_names_a_tenant() -> None:
    with server() as running:
        cold = running.cost("alice")
        fields = {"user": "alice", "session_id": "alice", "safety_identifier": "alice"}
        assert running.cost("bob", prompt_cache_key="alice", **fields).steps == cold.steps


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with server() as running:
        yield running


def test_everything_but_health_needs_a_key(keyed: Server) -> None:
    routes = [route for route in _routes(keyed.apps[0].routes) if isinstance(route, APIRoute)]
    paths = {(method, route.path) for route in routes for method in route.methods}
    assert ("POST", "/v1/completions") in paths and ("GET", "/dashboard/data") in paths
    paths |= {("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/"), ("GET", "/metrics")}
    for method, path in sorted(paths):
        url = keyed.url + path.replace("{", "").replace("}", "")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = httpx.request(method, url, headers=headers)
            if path == "/health":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "www-authenticate" in answer.headers


def _routes(routes: Any) -> Iterator[Any]:
    """With those of routers that are included as they are."""
    for route in routes:
        yield route
        yield from _routes(getattr(route, "routes", ()))
        original = getattr(route, "original_router", None)
        yield from _routes(getattr(original, "routes", ()))


def test_the_dashboard_shows_all_tenants_to_the_operator_only(keyed: Server) -> None:
    for path in ("/dashboard", "/dashboard/data"):
        for tenant in ("alice", "bob"):
            answer = httpx.get(keyed.url + path, headers={"x-api-key": KEYS[tenant]})
            assert answer.status_code in (401, 403), path
        answer = httpx.get(keyed.url + path, headers={"x-api-key": KEYS["default"]})
        assert answer.status_code == 200, path
    path = f"/dashboard/explain/{keyed.ask('bob').json()['id']}"
    for tenant, known in (("alice", False), ("bob", False), ("default", True)):
        answer = httpx.get(keyed.url + path, headers={"x-api-key": KEYS[tenant]})
        assert (answer.status_code == 200) == known


def test_a_key_is_never_in_an_answer_or_a_log(
    keyed: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answer = httpx.get(keyed.url + "/v1/models", headers={"x-api-key": "a-wrong-secret"})
    assert "secret" not in answer.text
    keyed.ask("alice", n=0)
    ours = [record.getMessage() for record in caplog.records if "pagedkv" in record.name]
    assert not [line for line in ours if "secret" in line or KEYS["alice"] in line]


# Modules whose loading runs what the data say.
_CODE_IN_DATA = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
_CODE_IN_DATA |= {"joblib", "jsonpickle", "multiprocessing", "yaml"}
_CODE_CALLS = {"eval", "exec", "torch.load", "torch.save", "pickle.loads"}
SOURCE = Path(pagedkv.__file__).parent


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    yield "allow_pickle"


def check_source(text: str) -> list[str]:
    """Names in a program by which data could become code."""
    tree = ast.parse(text)
    modules = [name for name in _modules(tree) if name.partition(".")[0] in _CODE_IN_DATA]
    return modules + [name for name in _calls(tree) if name in {*_CODE_CALLS, "allow_pickle"}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", ["pickle"]),
        (
            "def f():\n    from multiprocessing.connection import Client",
            ["multiprocessing.connection"],
        ),
        ("import torch\ntorch.load(x)", ["torch.load"]),
        ("np.load(x, allow_pickle=True)", ["allow_pickle"]),
        ("np.load(x, allow_pickle=False)", []),
        ("import msgspec", []),
    ],
)
def test_the_search_finds_what_it_looks_for(text: str, found: list[str]) -> None:
    assert check_source(text) == found


def test_no_data_become_code() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert SOURCE / "engine" / "wire.py" in files and SOURCE / "server" / "core_link.py" in files
    found = {str(file.relative_to(SOURCE)): check_source(file.read_text()) for file in files}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_tenants_key_is_known_and_not_enough_for_all_tenants_figures(keyed: Server) -> None:
    answer = httpx.get(keyed.url + "/metrics", headers={"x-api-key": KEYS["alice"]})
    assert answer.status_code == 403
    assert "operator's keys only" in answer.json()["error"]["message"]
