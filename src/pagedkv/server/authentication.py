"""Who may come in, and as which tenant: by the API key of the request."""

from __future__ import annotations

import base64
import binascii

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedkv.server.error_body import error_body
from pagedkv.server.keys import KeyRing
from pagedkv.server.settings import DEFAULT_TENANT

_TENANT = "pagedkv.tenant"
_OPEN_PATHS = frozenset({"/health"})
# A browser asks its user for a key only when it is asked in this way; and it then sends the key
# along with what other sites make it send, so it is good for looking only.
_PAGES = "/dashboard"


class KeyMiddleware:
    """Lets requests in that bring a key; everything but /health needs one, where there are keys.

    ASGI, around the whole application: what has no route needs a key too. A key is brought as
    `Authorization: Bearer KEY` or `x-api-key: KEY`; pages below /dashboard may also be asked for
    with HTTP Basic, where the password is the key, which is what a browser's own dialogue sends.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app, self._ring = app, ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant: str | None = DEFAULT_TENANT
        if len(self._ring):
            key = _key(scope)
            tenant = None if key is None else self._ring.tenant(key)
            if tenant is None:
                refusal = _refusal(scope, given=key is not None)
                await refusal(scope, receive, send)
                return
        await self._app({**scope, _TENANT: tenant}, receive, send)


def tenant_of(request: HTTPConnection) -> str:
    """The tenant whose key the request brought; the default tenant where there are no keys.

    The only source of it: a client cannot name a tenant. RuntimeError where no KeyMiddleware was.
    """
    tenant = request.scope.get(_TENANT)
    if not isinstance(tenant, str):
        raise RuntimeError("the request came past no KeyMiddleware: its tenant is not known")
    return tenant


def operator_only(request: Request) -> None:
    """A dependency of routes that show all tenants: HTTPException for one tenant's key.

    The operator's keys are those of the default tenant.
    """
    if tenant_of(request) != DEFAULT_TENANT:
        scope = request.scope
        raise HTTPException(
            401 if _is_page(scope) else 403,  # a browser asks for another key at 401 only
            "all tenants are shown here, to the operator's keys only: api_key, or those of the "
            f"tenant {DEFAULT_TENANT!r}",
            {"WWW-Authenticate": _challenge(scope)} if _is_page(scope) else None,
        )


def _challenge(scope: Scope) -> str:
    return 'Basic realm="pagedkv"' if _is_page(scope) else "Bearer"


def _is_page(scope: Scope) -> bool:
    path: str = scope["path"]
    return (path == _PAGES or path.startswith(_PAGES + "/")) and scope.get("method") in (
        "GET",
        "HEAD",
    )


def _key(scope: Scope) -> bytes | None:
    """The key that a request brings, None if it brings none, or two that differ."""
    keys = set()
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.add(value.strip())
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.add(rest.strip())
            elif scheme.lower() == b"basic" and _is_page(scope):
                keys.add(_password(rest.strip()))
    return keys.pop() if len(keys) == 1 else None


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _refusal(scope: Scope, *, given: bool) -> JSONResponse:
    message = (
        "the API key is not valid: ask the operator for one"
        if given
        else "one API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    body = error_body(message, "invalid_request_error", code="invalid_api_key")
    return JSONResponse(body, 401, headers={"WWW-Authenticate": _challenge(scope)})
