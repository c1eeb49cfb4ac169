"""The base of everything that a body may hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """No field is converted: "5" is no number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
