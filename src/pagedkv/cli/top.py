"""`pagedkv top`: the dashboard of a running server, in a terminal."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from pagedkv.cli.top_frame import View, frame
from pagedkv.errors import ConfigError, PagedKVError
from pagedkv.loadtest.answer import refusal

if TYPE_CHECKING:  # what it needs is in the extra `server`
    import httpx

_TIMEOUT = 10.0  # seconds


def top(
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
    every: Annotated[
        float, typer.Option(help="Seconds between two looks.", metavar="SECONDS", min=0.2)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch the blocks of a running server. In a terminal until Ctrl-C, else one look."""
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(f"--url={url!r:.200} or the API key cannot be sent: {error}") from error
    with client:
        server = _Server(client, url)
        server.look()
        console = Console(highlight=False)
        if once or not console.is_terminal:
            console.print(frame(server.view, console.width, height=None))
        else:
            _watch(server, every, console)


def _watch(server: _Server, every: float, console: Console) -> None:
    """Until an interrupt, which is how one leaves."""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                size = shutil.get_terminal_size()
                live.update(frame(server.view, size.columns, size.lines), refresh=True)
                time.sleep(every)
                try:
                    server.look()
                except PagedKVError as error:
                    server.view.trouble = str(error)
    except KeyboardInterrupt:
        return


class _Server:
    """What a server has to say, kept together in `view`."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url = client, url
        self.view = View(url)

    def look(self) -> None:
        """ConfigError: nobody answers, or not with a dashboard."""
        import httpx

        view = self.view
        query: dict[str, str | int] = {"pool": view.tag, "since": view.last, "run": view.run}
        try:
            answer = self._client.get("/dashboard/data", params=query)
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(f"--url={self._url!r:.200}: begin it with http://") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"nobody answers at --url={self._url:.200} ({type(error).__name__}: {error}): is "
                "`pagedkv serve` running there?"
            ) from error
        if answer.status_code != 200:
            raise ConfigError(self._refusal(answer))
        try:
            view.take(answer.json())
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--url={self._url:.200} answers with something else than a dashboard's data "
                f"({type(error).__name__}: {error}): is it a pagedkv server of this version?"
            ) from error

    def _refusal(self, answer: httpx.Response) -> str:
        where, why = f"the server at --url={self._url:.200}", refusal(answer.text)
        if answer.status_code == 401:
            return (
                f"{where} lets only its operator look ({why}): give --api-key or set "
                "PAGEDKV_API_KEY"
            )
        if answer.status_code == 404:
            return f"{where} has no dashboard: is it `pagedkv serve`?"
        return f"{where} answers with status {answer.status_code}: {why}"
