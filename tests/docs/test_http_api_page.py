"""The page of the HTTP API names every field that there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

from pagedkv.server.openai.chat import ChatRequest
from pagedkv.server.openai.completions import CompletionRequest
from pagedkv.server.openai.responses import ResponseRequest
from pagedkv.server.openai.tokens import DetokenizeRequest, TokenizeRequest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http_api.md"
BODIES = (CompletionRequest, ChatRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest)


def test_every_field_is_on_the_page() -> None:
    page = PAGE.read_text()
    for body in BODIES:
        missing = [name for name in body.model_fields if f"`{name}`" not in page]
        assert not missing, (body.__name__, missing)


def test_every_field_on_the_page_is_one() -> None:
    page = PAGE.read_text()
    fields = page[page.index("## Fields of completions") : page.index("## Fields of `/tokenize`")]
    known = set().union(*(body.model_fields for body in BODIES))
    rows = re.findall(r"^\| (`[^|]*) \|", fields, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 40 and named <= known
