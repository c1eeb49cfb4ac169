"""What the operator grants each tenant: its weight, and how much of the server it may take."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pagedkv.errors import ConfigError, OverloadError


@dataclass(frozen=True, slots=True)
class Tenant:
    """weight: its part of the service, relative to others' (policies with "fair" in their name).

    max_running: requests that have started and not ended, those preempted among them. max_waiting,
    max_waiting_tokens: requests that have not started, and their prompts together. None: no limit.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None


ORDINARY = Tenant()


def check_tenants(tenants: object, default: object) -> None:
    """ConfigError, naming tenant and setting, unless these are pairs of names and a `Tenant`."""
    _check_tenant("default_tenant", default)
    if not isinstance(tenants, tuple):
        raise ConfigError(f"tenants={tenants!r:.200} must be a tuple of pairs (name, Tenant)")
    names = []
    for pair in tenants:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"tenants: {pair!r:.200} must be a pair (name, Tenant)")
        name, tenant = pair
        if not isinstance(name, str) or not name:
            raise ConfigError(f"tenants: the name {name!r:.200} must be a text that is not empty")
        _check_tenant(f"tenant {name!r:.200}", tenant)
        names.append(name)
    if twice := [one for one, other in pairwise(sorted(names)) if one == other]:
        raise ConfigError(f"tenants: {twice[0]!r:.200} is there twice: name each once")


def _check_tenant(name: str, tenant: object) -> None:
    if not isinstance(tenant, Tenant):
        raise ConfigError(
            f"{name}: {tenant!r:.200} must be a pagedkv.Tenant, such as Tenant(weight=2)"
        )
    weight = tenant.weight
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not 1e-6 <= weight <= 1e6:
        raise ConfigError(f"{name}: weight={weight!r:.200} must be above 0, from 1e-6 to 1e6")
    for field in ("max_running", "max_waiting", "max_waiting_tokens"):
        limit = getattr(tenant, field)
        integer = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and (not integer or limit < 1):
            raise ConfigError(f"{name}: {field}={limit!r:.200} must be an integer >= 1, or None")


def check_quota(name: str | None, tenant: Tenant, requests: int, tokens: int, more: int) -> None:
    """OverloadError if a prompt of `more` tokens may not wait beside so many requests and tokens.

    requests, tokens: those of the tenant that wait and have not started.
    """
    who = f"tenant {name!r:.200}" if name is not None else "requests without a tenant"
    most = tenant.max_waiting
    if most is not None and requests >= most:
        raise OverloadError(
            f"{who}: {requests} requests wait and max_waiting={most}: try again when some have "
            "started"
        )
    most = tenant.max_waiting_tokens
    if most is not None and tokens + more > most:
        raise OverloadError(
            f"{who}: prompts of {tokens} tokens wait, one of {more} is too much for "
            f"max_waiting_tokens={most}: try again when some have started"
        )


class TenantTable:
    """Tenants by name; those that the operator has not named get what the default grants, each.

    Requests that name no tenant (None) are those of one tenant.
    """

    def __init__(self, tenants: tuple[tuple[str, Tenant], ...], default: Tenant) -> None:
        self._tenants: dict[str | None, Tenant] = dict(tenants)
        self._default = default

    def __getitem__(self, name: str | None) -> Tenant:
        return self._tenants.get(name, self._default)
