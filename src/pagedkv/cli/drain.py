"""`pagedkv drain`: a worker of a running server gives its requests to the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from pagedkv.errors import ConfigError
from pagedkv.loadtest.answer import refusal

if TYPE_CHECKING:  # what it needs is in the extra `server`
    import httpx

_TIMEOUT = 10.0  # seconds
_EVERY = 0.2  # seconds between two looks


def drain(
    worker: Annotated[
        str | None,
        typer.Argument(help="Such as worker-0. Without one: how all are.", metavar="WORKER"),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the worker take requests again.")
    ] = False,
    url: Annotated[
        str, typer.Option(help="Of the server.", metavar="URL", envvar="PAGEDKV_URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The operator's, where the server has keys.",
            metavar="TEXT",
            envvar="PAGEDKV_API_KEY",
        ),
    ] = None,
) -> None:
    """Take a worker out of service: its requests move to others, without their clients noticing."""
    import httpx

    if undo and worker is None:
        raise ConfigError("--undo is of one worker: name it, as in `pagedkv drain worker-0 --undo`")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(f"--url={url!r:.200} or the API key cannot be sent: {error}") from error
    with client:
        server = _Server(client, url)
        if worker is None:
            for one in server.ask("GET", "/workers"):
                print(_line(one))
            return
        path = f"/workers/{quote(worker, safe='')}/drain"
        if undo:
            print(_line(server.ask("DELETE", path)))
            return
        state = server.ask("POST", path)
        shown = _line(state)
        print(shown)
        while state["requests"] and state["state"] == "draining":
            time.sleep(_EVERY)
            before = state["stuck"]
            state = next(one for one in server.ask("GET", "/workers") if one["name"] == worker)
            if state["stuck"] not in (None, before):
                shown = _line(state)
                print(shown)
        if _line(state) != shown:
            print(_line(state))


def _line(worker: dict[str, Any]) -> str:
    return (
        f"{worker['name']} ({worker['role']}): {worker['state']}, "
        f"{worker['requests']} request{'' if worker['requests'] == 1 else 's'}, "
        f"{worker['blocks_held']} of {worker['blocks']} blocks held, "
        f"{worker['restarts']} restarts, {worker['flips']} changes of role"
        + ("" if worker["stuck"] is None else f"; requests stay: {worker['stuck']}")
    )


class _Server:
    """What a server answers, as values."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url = client, url

    def ask(self, method: str, path: str) -> Any:
        """ConfigError: nobody answers, or not as a server with workers."""
        import httpx

        try:
            answer = self._client.request(method, path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"nobody answers at --url={self._url:.200} ({type(error).__name__}: {error}): is "
                "`pagedkv serve` running there?"
            ) from error
        if answer.status_code == 200:
            return answer.json()
        why = refusal(answer.text)
        if answer.status_code in (401, 403):
            why += ": give the operator's --api-key or set PAGEDKV_API_KEY"
        elif answer.status_code == 404:
            why = "it has no workers: start it with `pagedkv serve --workers 2`"
        raise ConfigError(f"the server at --url={self._url:.200} answers: {why}")
