"""/v1/completions through OpenAI's own client."""

from __future__ import annotations

import openai
import pytest
from serving import MODEL, http_server


def test_stream_and_whole_answer_are_equal() -> None:
    with http_server() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked = {"model": MODEL, "prompt": "a prompt", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"


def test_errors_have_openais_form() -> None:
    with http_server() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
            client.completions.create(model=MODEL, prompt="")
