"""An LLM made of plain values, as they travel to another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.engine.llm import LLM
from pagedkv.engine.tiers import TierConfig
from pagedkv.scheduling.tenants import Tenant


def make_llm(arguments: Mapping[str, Any]) -> LLM:
    """As `LLM` there, but tiers and tenants are dicts of their fields."""
    given = dict(arguments)
    if given.get("tiers") is not None:
        given["tiers"] = TierConfig(**given["tiers"])
    settings = dict(given.get("scheduling") or {})
    tenants = settings.get("tenants")
    if tenants is not None:
        settings["tenants"] = {name: Tenant(**granted) for name, granted in tenants.items()}
    if "default_tenant" in settings:
        settings["default_tenant"] = Tenant(**settings["default_tenant"])
    given["scheduling"] = settings
    return LLM(**given)
