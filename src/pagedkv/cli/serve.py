"""`pagedkv serve`: the options, which are the settings of the server.

The options are made of the settings' models, so that a setting is described in one place. Those
need the packages of the extra "server" and are imported when the command runs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from pagedkv.server.layers import Loaded

# Everything goes to the options that are made here, --help too.
PASS_ON = {"ignore_unknown_options": True, "help_option_names": []}


def serve(args: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> int:
    """Serve a model over HTTP, with the API of OpenAI."""
    given = args or []
    _refuse_foreign(given)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_command(_start))
    status = typer.main.get_command(app).main(given, "pagedkv serve", standalone_mode=False)
    return status if isinstance(status, int) else 0


def _start(loaded: Loaded, print_config: bool) -> int:
    from pagedkv.server.print_settings import as_toml

    if print_config:
        print(as_toml(loaded), end="")
        return 0
    from pagedkv.server.serve import run

    return run(loaded.settings)


def _command(run: Callable[[Loaded, bool], int]) -> Callable[..., int]:
    """A function with a parameter for every setting that has a flag, as typer reads it."""
    from pagedkv.server.layers import SECTIONS, load_settings

    def command(
        model_name: str | None, config: Path | None, print_config: bool, **flags: object
    ) -> int:
        """Serve a model over HTTP, with the API of OpenAI.

        Every setting can also stand in the TOML file of --config, or in a variable: PAGEDKV_PORT
        for --port. Flags outweigh variables, which outweigh the file. Tenants, classes of service
        and public prefixes stand in the file alone.
        """
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        if model_name is not None and given.setdefault("model", model_name) != model_name:
            raise ConfigError(
                f"MODEL={model_name!r} and --model={given['model']!r} differ: give one"
            )
        return run(load_settings(config, os.environ, given), print_config)

    parameters = [
        _parameter(
            "model_name", str | None, None, typer.Argument(metavar="MODEL", help="As --model.")
        ),
        _parameter(
            "config", Path | None, None, typer.Option(help="File of settings.", metavar="FILE")
        ),
        _parameter(
            "print_config",
            bool,
            False,
            typer.Option("--print-config", help="Print all settings and where they come from."),
        ),
    ]
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            parameters.append(_setting(section, name, field))
    # Typer makes a command's options of its signature; functions have no such attribute by type.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _setting(section: str, name: str, field: FieldInfo) -> inspect.Parameter:
    from pagedkv.server.print_settings import toml_value
    from pagedkv.server.setting_types import flag_names

    default = "" if field.default in (None, ()) else f" [{toml_value(field.default)}]"
    option = typer.Option(
        *flag_names(name, field),
        help=f"{field.description}{default}",
        metavar=None if field.annotation is bool else "VALUE",
        rich_help_panel=section.capitalize(),
        show_default=False,
    )
    if field.annotation is bool:
        return _parameter(name, bool | None, None, option)
    several = isinstance(field.default, tuple)
    return _parameter(name, list[str] | None if several else str | None, None, option)


def _parameter(
    name: str, kind: type | UnionType, default: object, option: Any
) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _refuse_foreign(args: Sequence[str]) -> None:
    """ConfigError for options that users of other servers know, with what is used here instead."""
    from pagedkv.server.layers import FOREIGN, flag, refuse_name

    for arg in args:
        option = arg.partition("=")[0]
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in FOREIGN:
            refuse_name(option, name, (), flag)
