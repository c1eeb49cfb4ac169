"""What a setting says is what the server does: over HTTP, on the toy model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from serving import MODEL, http_server, settings

import pagedkv
from pagedkv.engine.wire import ToCore
from pagedkv.scheduling.messages import Add
from pagedkv.server.app import create_app
from pagedkv.server.async_engine import AsyncEngine
from pagedkv.server.keys import key_hash
from pagedkv.server.settings import ServerSettings, ServeSettings, SloClass, TenantSettings


@contextmanager
def server(given: ServeSettings, watch: Callable[[Any], None] = lambda sent: None) -> Iterator[str]:
    def make_app(engine: AsyncEngine) -> FastAPI:
        engine.senders.append(watch)
        return create_app(engine, given)

    with http_server(make_app=make_app) as url:
        yield url


def ask(url: str, key: str = "none", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 2, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)


def test_a_request_may_be_so_large() -> None:
    with server(settings(max_body_bytes=2000, max_header_bytes=2000)) as url:
        answer = ask(url, prompt="a" * 3000)
        assert answer.status_code == 413
        assert "2000 bytes" in answer.json()["error"]["message"]
        answer = httpx.get(f"{url}/v1/models", headers={"x-long": "a" * 3000})
        assert answer.status_code in (400, 431)
        assert ask(url).status_code == 200


def test_pages_that_are_switched_off_are_not_there() -> None:
    with server(settings()) as url:
        assert httpx.get(f"{url}/dashboard").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
    with server(settings(dashboard=False, metrics=False)) as url:
        assert httpx.get(f"{url}/dashboard").status_code == 404
        assert httpx.get(f"{url}/metrics").status_code == 404
        assert ask(url).status_code == 200


def test_metrics_are_the_operators() -> None:
    keys = {"key-of-a": "a", "key-of-the-operator": "default"}
    with server(settings(keys)) as url:
        statuses = [
            httpx.get(f"{url}/metrics", headers={"x-api-key": key}).status_code for key in keys
        ]
    assert statuses == [403, 200]


@pytest.mark.parametrize(("labels", "named"), [(10, {"a", "b"}), (1, {"a"}), (0, set())])
def test_so_many_tenants_have_metrics_of_their_own(labels: int, named: set[str]) -> None:
    keys = {"key-a": "a", "key-b": "b", "key": "default"}
    with server(settings(keys, max_tenant_labels=labels)) as url:
        for key in ("key-a", "key-b"):
            assert ask(url, key).status_code == 200
        text = httpx.get(f"{url}/metrics", headers={"x-api-key": "key"}).text
    assert {name for name in "ab" if f'tenant="{name}"' in text} == named


def test_origins_are_allowed_one_by_one() -> None:
    question = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with server(settings(cors_origins=("https://a.example",))) as url:
        answer = httpx.options(f"{url}/v1/completions", headers=question)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(
            f"{url}/v1/completions", headers=question | {"Origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in other.headers
    with server(settings()) as url:
        answer = httpx.options(f"{url}/v1/completions", headers=question)
        assert "access-control-allow-origin" not in answer.headers


def test_a_request_ends_after_the_time_of_the_operator() -> None:
    with server(settings(request_timeout=1e-9)) as url:
        assert ask(url).status_code == 504
        assert ask(url, deadline_ms=60_000).status_code == 200


def test_a_tenant_has_the_promises_of_its_class() -> None:
    given = ServeSettings(
        server=settings().server,
        tenants={
            "a": TenantSettings(key_hashes=(key_hash("key-a"),), slo_class="chat"),
            "b": TenantSettings(key_hashes=(key_hash("key-b"),)),
        },
        slo_classes={"chat": SloClass(ttft_slo_ms=500, tpot_slo_ms=50, priority=7)},
    )
    sent: list[ToCore] = []
    with server(given, sent.append) as url:
        for key, fields in (("key-a", {}), ("key-a", {"ttft_slo_ms": 100}), ("key-b", {})):
            assert ask(url, key, **fields).status_code == 200
    added = [one for one in sent if isinstance(one, Add)]
    found = [(one.tenant, one.ttft_slo, one.tpot_slo, one.priority) for one in added]
    assert found == [("a", 0.5, 0.05, 7), ("a", 0.1, 0.05, 7), ("b", None, None, 0)]


def test_every_setting_of_the_server_is_read_somewhere() -> None:
    source = Path(pagedkv.__file__).parent
    declared = {"settings.py", "layers.py", "setting_types.py", "print_settings.py"}
    text = "\n".join(
        file.read_text()
        for file in sorted((source / "server").rglob("*.py"))
        if file.name not in declared
    )
    text += (source / "server" / "settings.py").read_text().partition("class ServeSettings")[2]
    text += (source / "server" / "keys.py").read_text()
    unread = [
        name
        for name in ServerSettings.model_fields
        if not re.search(rf"(?:given|server|settings|allowed)\.{name}\b", text)
    ]
    assert not unread
