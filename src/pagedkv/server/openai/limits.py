"""What the operator lets one body ask for, as far as it is less than what the engine can do."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.scheduling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOPS
from pagedkv.server.openai.errors import FieldError
from pagedkv.server.openai.protocol import MAX_PROMPTS, Generation


@dataclass(frozen=True)
class Limits:
    """Names as those of the settings."""

    max_prompts: int = MAX_PROMPTS
    max_n: int = MAX_N
    max_logprobs: int = MAX_LOGPROBS
    max_stop: int = MAX_STOPS
    max_logit_bias: int = MAX_LOGIT_BIAS

    def check(self, body: Generation, num_prompts: int = 1, **logprobs: int | None) -> None:
        """FieldError names the field, how much it asks for, and how much it may.

        logprobs: by the name of the field, which is not the same in all bodies.
        """
        stops = 1 if isinstance(body.stop, str) else len(body.stop or ())
        for name, asked, most in (
            ("prompt", num_prompts, self.max_prompts),
            ("n", body.n or 1, self.max_n),
            *((name, asked or 0, self.max_logprobs) for name, asked in logprobs.items()),
            ("prompt_logprobs", body.prompt_logprobs or 0, self.max_logprobs),
            ("stop", stops, self.max_stop),
            ("logit_bias", len(body.logit_bias or ()), self.max_logit_bias),
        ):
            if asked > most:
                raise FieldError(f"{name} asks for {asked}: this server allows {most}", name)
