"""Who is served next, and who yields: one module a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pagedkv.cache import BlockManager
from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.cost import CostModel
from pagedkv.scheduling.policies.deadline import Deadline
from pagedkv.scheduling.policies.fair import Fair
from pagedkv.scheduling.policies.fair_deadline import FairDeadline
from pagedkv.scheduling.policies.fair_prefix import FairPrefix
from pagedkv.scheduling.policies.fcfs import Fcfs
from pagedkv.scheduling.policies.interface import Policy
from pagedkv.scheduling.policies.priority import Priority
from pagedkv.scheduling.tenants import TenantTable

Builder = Callable[[SchedulerConfig, TenantTable, CostModel, BlockManager], Policy]
POLICIES: Mapping[str, Builder] = MappingProxyType(
    {
        "fcfs": lambda config, tenants, cost, manager: Fcfs(),
        "priority": lambda config, tenants, cost, manager: Priority(config.ageing),
        "deadline": lambda config, tenants, cost, manager: Deadline(config.ageing, cost),
        "fair": lambda config, tenants, cost, manager: Fair(tenants, _slots(manager)),
        "fair+prefix": lambda config, tenants, cost, manager: FairPrefix(
            tenants, manager, config.ageing
        ),
        "fair+deadline": lambda config, tenants, cost, manager: FairDeadline(
            tenants,
            _slots(manager),
            Deadline(config.ageing, cost),
            cost,
            config.urgent_slack,
            config.urgent_service,
        ),
    }
)


def check_policy(name: object) -> None:
    """ConfigError unless there is a policy of that name."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"policy={name!r:.200} is unknown: choose one of {sorted(POLICIES)}")


def make_policy(
    config: SchedulerConfig, tenants: TenantTable, cost: CostModel, manager: BlockManager
) -> Policy:
    """A fresh policy for one scheduler. ConfigError for a name that there is not."""
    check_policy(config.policy)
    return POLICIES[config.policy](config, tenants, cost, manager)


def _slots(manager: BlockManager) -> int:
    return manager.num_blocks * manager.block_size
