"""Options of the commands that run a model in this process."""

from __future__ import annotations

from typing import Annotated

import typer

EMBEDDED = "smollm2-135m-instruct"
_TEXT, _INTEGER = "TEXT", "INTEGER"

Model = Annotated[
    str,
    typer.Option(help="Embedded model, Hugging Face folder, or hub id.", metavar=_TEXT),
]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.", metavar=_TEXT)]
BlockSize = Annotated[int, typer.Option(help="Tokens a block.", metavar=_INTEGER)]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks of the pool.", metavar=_INTEGER)]
KVMemory = Annotated[
    str | None,
    typer.Option(help="Memory of the pool: bytes, 512MiB, 2GB.", metavar="SIZE"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and output together.", metavar=_INTEGER),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most samples that run at once.", metavar=_INTEGER)]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Most tokens that a step computes.", metavar=_INTEGER)
]
NoPrefixCaching = Annotated[
    bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its start.")
]
Backend = Annotated[
    str,
    typer.Option(help="Attention: auto, native, gather or reference.", metavar=_TEXT),
]
Kernels = Annotated[str, typer.Option(help="Other layers: auto, native or torch.", metavar=_TEXT)]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same bits whatever else runs.")
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]
