"""API keys: hashed, compared in constant time, and the only source of the tenant."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient, WebSocketDenialResponse

from pagedkv.server.authentication import KeyMiddleware, tenant_of
from pagedkv.server.keys import KeyRing, key_hash, new_key
from pagedkv.server.layers import load_settings

ALICE, BOB, UMLAUT = new_key(), new_key(), "schlüssel-Ω"
RING = KeyRing([(key_hash(ALICE), "alice"), (key_hash(BOB), "bob"), (key_hash(UMLAUT), "carl")])


async def _who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(tenant_of(request))


async def _open(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


def client(ring: KeyRing = RING) -> TestClient:
    routes = [
        Route("/health", _open),
        Route("/who", _who, methods=["GET", "POST"]),
        Route("/dashboard", _who, methods=["GET", "POST"]),
        Route("/metrics", _who),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(KeyMiddleware, ring=ring)
    return TestClient(app)


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"Authorization": f"Bearer {ALICE}"}, "alice"),
        ({"Authorization": f"bearer   {BOB}"}, "bob"),
        ({"x-api-key": BOB}, "bob"),
        ({"X-API-Key": BOB, "Authorization": f"Bearer {BOB}"}, "bob"),
        ({"x-api-key": UMLAUT.encode()}, "carl"),
        ({"Authorization": b"Bearer " + UMLAUT.encode()}, "carl"),
    ],
)
def test_a_key_gives_its_tenant(headers: dict[str, Any], tenant: str) -> None:
    answer = client().get("/who", headers=headers)
    assert (answer.status_code, answer.text) == (200, tenant)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {ALICE}x"},
        {"Authorization": f"Bearer {ALICE[:-1]}"},
        {"Authorization": f"Bearer {key_hash(ALICE)}"},
        {"Authorization": ALICE},
        {"Authorization": "Bearer"},
        {"Authorization": ""},
        {"Authorization": f"Basic {base64.b64encode(f':{ALICE}'.encode()).decode()}"},
        {"x-api-key": ""},
        {"x-api-key": ALICE, "Authorization": f"Bearer {BOB}"},
        {"x-api-key": UMLAUT.encode("utf-16")},
        {"x-api-key": b"\xff\xfe\x00"},
        {"Authorization": "Bearer " + "k" * 10**6},
    ],
)
def test_without_a_valid_key_nothing_is_told(headers: dict[str, Any]) -> None:
    answer = client().get("/who", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert ALICE not in answer.text


def test_everything_but_health_needs_a_key() -> None:
    keyless = client()
    assert keyless.get("/health").text == "ok"
    for path in ("/who", "/metrics", "/dashboard", "/no-such-route", "/health/", "//health", "/"):
        assert keyless.get(path).status_code == 401, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert keyless.request(method, "/who").status_code == 401, method


def test_without_keys_all_are_the_default_tenant() -> None:
    answer = client(KeyRing([])).get("/who", headers={"x-api-key": "anything"})
    assert (answer.status_code, answer.text) == (200, "default")


def test_the_tenant_never_comes_from_the_client() -> None:
    answer = client().post(
        "/who?tenant=bob",
        headers={"x-api-key": ALICE, "x-tenant": "bob", "tenant": "bob"},
        content=json.dumps({"tenant": "bob", "user": "bob"}),
    )
    assert answer.text == "alice"


def test_a_browser_may_look_at_the_dashboard_with_its_own_dialogue() -> None:
    basic = {"Authorization": f"Basic {base64.b64encode(f'x:{BOB}'.encode()).decode()}"}
    browser = client()
    assert browser.get("/dashboard").headers["www-authenticate"] == 'Basic realm="pagedkv"'
    assert browser.get("/dashboard", headers=basic).text == "bob"
    assert browser.post("/dashboard", headers=basic).status_code == 401
    assert browser.get("/dashboards", headers=basic).status_code == 401
    for wrong in ("", "%%%", base64.b64encode(BOB.encode()).decode()):
        answer = browser.get("/dashboard", headers={"Authorization": f"Basic {wrong}"})
        assert answer.status_code == 401


def test_a_key_is_compared_with_every_hash_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[Any, Any]] = []
    genuine = hmac.compare_digest

    def counting(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return genuine(one, other)

    monkeypatch.setattr("pagedkv.server.keys.hmac.compare_digest", counting)
    for key, tenant in ((ALICE, "alice"), (UMLAUT, "carl"), ("wrong", None)):
        compared.clear()
        assert RING.tenant(key.encode()) == tenant
        assert len(compared) == len(RING)
        assert all(len(one) == len(other) == 32 for one, other in compared)


def test_only_hashes_are_kept() -> None:
    assert ALICE.encode() not in b" ".join(map(str.encode, map(repr, vars(RING).values())))
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 47 and key.isascii() for key in keys)


def test_keys_come_from_tenants_and_from_the_variable(tmp_path: Any) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[tenants.alice]\nkey_hashes = ["{key_hash(ALICE)}", "{key_hash(BOB)}"]\n')
    loaded = load_settings(file, {"PAGEDKV_API_KEY": "one,two"}, {})
    ring = KeyRing.of(loaded.settings)
    assert [ring.tenant(key) for key in (b"one", b"two", ALICE.encode(), BOB.encode())] == [
        "default",
        "default",
        "alice",
        "alice",
    ]
    assert ring.tenant(b"one,two") is None


def test_a_request_that_nobody_has_let_in_has_no_tenant() -> None:
    app = Starlette(routes=[Route("/who", _who)])
    with pytest.raises(RuntimeError, match="no KeyMiddleware"):
        TestClient(app).get("/who")


HEADER_NAMES = st.sampled_from([b"authorization", b"x-api-key", b"other"])
HEADER_VALUES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"Bearer", b"Bearer ", b"Basic ", b"Basic Og==", b"Basic :", b"bearer\tk"]),
    st.binary(max_size=20).map(lambda data: b"Bearer " + data),
    st.binary(max_size=20).map(lambda data: b"Basic " + base64.b64encode(data)),
)


@given(
    st.sampled_from(["/who", "/dashboard", "/dashboard/x", "/health/", ""]),
    st.sampled_from(["GET", "POST"]),
    st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=3),
)
def test_no_header_gets_in_or_raises(
    path: str, method: str, headers: list[tuple[bytes, bytes]]
) -> None:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("somebody came in")

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": headers}
    asyncio.run(KeyMiddleware(inner, RING)(scope, receive, send))
    assert sent[0]["status"] == 401


def test_a_websocket_without_a_key_is_refused() -> None:
    with pytest.raises(WebSocketDenialResponse), client().websocket_connect("/who"):
        pass
