"""Who is served next, and who yields: one module a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.policies.deadline import Deadline
from pagedkv.scheduling.policies.fair import Fair
from pagedkv.scheduling.policies.fair_deadline import FairDeadline
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.policies.interface import Policy
from pagedkv.scheduling.policies.priority import Priority
from pagedkv.scheduling.tenants import TenantTable

POLICIES: Mapping[str, Callable[[SchedulerConfig, TenantTable, CostModel], Policy]] = (
    MappingProxyType(
        {
            "fcfs": lambda config, tenants, cost: Fcfs(),
            "priority": lambda config, tenants, cost: Priority(config.ageing),
            "deadline": lambda config, tenants, cost: Deadline(config.ageing, cost),
            "fair": lambda config, tenants, cost: Fair(tenants),
            "fair+deadline": lambda config, tenants, cost: FairDeadline(
                tenants,
                Deadline(config.ageing, cost),
                cost,
                config.urgent_slack,
                config.urgent_service,
            ),
        }
    )
)


def check_policy(name: object) -> None:
    """ConfigError unless there is a policy of that name."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"policy={name!r:.200} is unknown: choose one of {sorted(POLICIES)}")


def make_policy(config: SchedulerConfig, tenants: TenantTable, cost: CostModel) -> Policy:
    """A fresh policy for one scheduler. ConfigError for a name that there is not."""
    check_policy(config.policy)
    return POLICIES[config.policy](config, tenants, cost)
