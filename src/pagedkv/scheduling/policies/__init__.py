"""Who is served next, and who yields: one module a policy."""

from __future__ import annotations

from pagedkv.errors import ConfigError
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.policies.interface import Policy

POLICIES = {"fcfs": Fcfs}


def make_policy(name: str) -> Policy:
    """A fresh policy by its name. ConfigError for a name that there is not."""
    if name not in POLICIES:
        raise ConfigError(f"policy={name!r:.200} is unknown: choose one of {sorted(POLICIES)}")
    return POLICIES[name]()
