"""What the operator lets one body ask for, as far as it is less than what the engine can do."""

from __future__ import annotations

from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.protocol import Generation
from pagedkv.server.settings import ServerSettings


def check_limits(
    allowed: ServerSettings, body: Generation, num_prompts: int = 1, **logprobs: int | None
) -> None:
    """FieldError names the field, how much it asks for, and how much it may.

    logprobs: by the name of the field, which is not the same in all bodies.
    """
    stops = 1 if isinstance(body.stop, str) else len(body.stop or ())
    for name, asked, most in (
        ("prompt", num_prompts, allowed.max_prompts),
        ("n", body.n or 1, allowed.max_n),
        *((name, asked or 0, allowed.max_logprobs) for name, asked in logprobs.items()),
        ("prompt_logprobs", body.prompt_logprobs or 0, allowed.max_logprobs),
        ("stop", stops, allowed.max_stop),
        ("logit_bias", _length(body.logit_bias), allowed.max_logit_bias),
    ):
        if asked > most:
            raise FieldError(f"{name} asks for {asked}: this server allows {most}", name)


def _length(biases: object) -> int:
    return len(biases) if isinstance(biases, dict) else 0
