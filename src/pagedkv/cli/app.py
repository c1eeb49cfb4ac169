"""The commands and how their arguments are read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated

import typer

from pagedkv import __version__
from pagedkv.cli.bench import block_size
from pagedkv.cli.bench_engine import latency, throughput
from pagedkv.cli.bench_parts import attention
from pagedkv.cli.bench_parts import cache as bench_cache
from pagedkv.cli.bench_serve import serve as bench_serve
from pagedkv.cli.chat import chat
from pagedkv.cli.doctor import doctor
from pagedkv.cli.drain import drain
from pagedkv.cli.explain import explain
from pagedkv.cli.generate import generate
from pagedkv.cli.key import new
from pagedkv.cli.main import INTERRUPTED
from pagedkv.cli.plan import plan
from pagedkv.cli.replay import replay_log
from pagedkv.cli.replay_run import replay
from pagedkv.cli.serve import PASS_ON, serve
from pagedkv.cli.simulate import serve as simulate_serve
from pagedkv.cli.simulate_cluster import cluster
from pagedkv.cli.simulate_memory import allocators, cache, memory
from pagedkv.cli.top import top
from pagedkv.errors import PagedKVError, ReportError

# What the library calls the settings. Words of everyday language stand for a setting only with
# their value.
_FLAGS = MappingProxyType(
    {
        "attention_backend": "--backend",
        "block_size": "--block-size",
        "kv_cache_memory": "--kv-memory",
        "max_model_len": "--max-model-len",
        "max_num_seqs": "--max-num-seqs",
        "max_tokens": "--max-tokens",
        "mean_tokens": "--mean-output",
        "kernels=": "--kernels=",
        "min_p": "--min-p",
        "num_blocks": "--num-blocks",
        "repetition_penalty": "--repetition-penalty",
        "top_k": "--top-k",
        "top_p": "--top-p",
        "input_len": "--input-len",
        "output_len": "--output-len",
        "range_ratio": "--random-range-ratio",
        "prefix_len": "--prefix-repetition-prefix-len",
        "suffix_len": "--prefix-repetition-suffix-len",
        "num_prompts": "--num-prompts",
        "batch_size": "--batch-size",
        "num_iters_warmup": "--num-iters-warmup",
        "num_iters": "--num-iters",
        "random_prefix_len": "--random-prefix-len",
        "context_len": "--context-len",
        "query_len": "--query-len",
        "shared_prefix_len": "--shared-prefix-len",
        "num_heads": "--num-heads",
        "num_kv_heads": "--num-kv-heads",
        "head_dim": "--head-dim",
        "num_layers": "--num-layers",
        "num_seqs": "--num-seqs",
        "prompt_len": "--prompt-len",
        "seconds=": "--seconds=",
        "rounds=": "--rounds=",
        "num_prefixes": "--prefix-repetition-num-prefixes",
        "request_rate": "--request-rate",
        "host_memory": "--host-tier",
        "disk_folder": "--disk-tier",
        "disk_memory": "--disk-tier-size",
        "write_through=True": "--write-through",
        "host_blocks": "--host-blocks",
        "policy=": "--policy=",
        "admission=": "--admission=",
        "recovery=": "--recovery=",
        "replay_log": "--replay-log",
        "decision_log": "--decision-log",
        "record=": "--record=",
        "sanitize=True": "--sanitize",
        "deterministic=True": "--deterministic",
        "deterministic=False": "no --deterministic",
        "dtype=": "--dtype=",
        "n=": "-n=",
        "seed=": "--seed=",
        "stop=": "--stop=",
        "temperature=": "--temperature=",
    }
)
# Not inside a word, a path, an option or a quotation.
_NAME = re.compile(rf"(?<![\w./'\"-])({'|'.join(_FLAGS)})(?:(?<==)|\b)")


class UsageError(PagedKVError):
    """The command line itself is wrong: an unknown option, a value of the wrong type."""


def invoke(args: list[str]) -> int:
    """Runs one command and returns its exit status. Raises UsageError instead of printing help."""
    app = typer.Typer(
        name="pagedkv",
        help="LLM serving on a paged KV cache.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command()(generate)
    app.command(context_settings=PASS_ON)(serve)
    app.command()(chat)
    app.command()(explain)
    app.command("replay")(replay_log)
    app.command()(plan)
    app.command()(doctor)
    app.command()(top)
    app.command()(drain)
    simulate = typer.Typer(help="What a trace of requests would have made of a pool.")
    for command in (cache, memory, allocators):
        simulate.command()(command)
    simulate.command("serve")(simulate_serve)
    simulate.command()(cluster)
    simulate.command()(replay)
    app.add_typer(simulate, name="simulate")
    bench = typer.Typer(
        help="What this machine makes of the engine and its parts, and what users of a server see."
    )
    for measurement in (throughput, latency, attention):
        bench.command()(measurement)
    bench.command("cache")(bench_cache)
    bench.command("block-size")(block_size)
    bench.command("serve")(bench_serve)
    app.add_typer(bench, name="bench")
    key = typer.Typer(help="API keys of the server.")
    key.callback()(lambda: None)  # a group although it has one command
    key.command()(new)
    app.add_typer(key, name="key")
    app.callback()(_callback)
    command = typer.main.get_command(app)
    try:
        status = command.main(args or ["--help"], prog_name="pagedkv", standalone_mode=False)
    except typer.Abort:  # what older versions make of an interrupt
        raise KeyboardInterrupt from None
    except ReportError:
        raise
    except PagedKVError as error:
        raise UsageError(in_flags(str(error))) from error
    except Exception as error:
        # Usage errors of click, which typer has, depending on its version, inside or beside it.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        where = getattr(getattr(error, "ctx", None), "command_path", "pagedkv")
        raise UsageError(f"{message()}{_got(error, args)} (see {where} --help)") from error
    if status == INTERRUPTED:  # what newer versions make of it
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def in_flags(message: str) -> str:
    """A message of the library with its settings under the names that they have here."""
    return _NAME.sub(lambda name: _FLAGS[name[0]], message)


def _got(error: Exception, args: Sequence[str]) -> str:
    """The value of the option that an error is about, where its message may not show it."""
    options = getattr(getattr(error, "param", None), "opts", ())
    for option, value in itertools.pairwise(args):
        if option in options:
            return f", got {value!r}"
    return ""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedkv {__version__}")
        raise typer.Exit


def _callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """LLM serving on a paged KV cache."""
