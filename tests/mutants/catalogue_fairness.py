"""Faults in what tenants get: counters, grants, shares, quotas, priorities."""

from __future__ import annotations

from kinds import Mutant

_FAIR = "scheduling/test_fair.py::test_"
_TURNS = "scheduling/test_turns.py::test_"
_PRIORITY = "scheduling/test_priority.py::test_"

MUTANTS = (
    Mutant(
        "being idle earns credit",
        ("fairness",),
        "scheduling/policies/counters.py",
        "self._counters[tenant] = max(self[tenant], self._level)",
        "self._counters[tenant] = self[tenant]",
        (_FAIR + "who_was_idle_has_no_credit",),
    ),
    Mutant(
        "waiting for the own quota earns credit",
        ("fairness",),
        "scheduling/roster.py",
        "        if was_full and self.waiting.line(tenant):\n",
        "        if False:\n",
        (_FAIR + "who_waited_for_its_own_quota_has_no_credit_either",),
    ),
    Mutant(
        "a prompt is charged again after a preemption",
        ("fairness",),
        "scheduling/policies/fair.py",
        "        if not again:\n",
        "        if True:\n",
        (_FAIR + "what_is_computed_again_is_charged_to_nobody",),
    ),
    Mutant(
        "weights multiply service instead of dividing it",
        ("fairness",),
        "scheduling/policies/counters.py",
        "tokens / self._tenants[tenant].weight",
        "tokens * self._tenants[tenant].weight",
        (_FAIR + "a_weight_of_two_is_served_twice_as_often",),
    ),
    Mutant(
        "tenants that are gone are remembered",
        ("bounded memory",),
        "scheduling/policies/counters.py",
        "            if counter > self._level or tenant in kept\n",
        "            if counter or tenant in kept\n",
        (_FAIR + "a_hundred_thousand_tenants_are_forgotten_and_a_debt_is_not",),
    ),
    Mutant(
        "whoever has had least yields first",
        ("fairness", "preemption"),
        "scheduling/policies/fair.py",
        "return (self.counters[request.tenant],)",
        "return (-self.counters[request.tenant],)",
        (_FAIR + "the_tenant_with_the_most_yields_first",),
    ),
    Mutant(
        "a flood's prefills go before those of a tenant within its share",
        ("fairness",),
        "scheduling/policies/fair.py",
        "return self._occupancy.modest(requests)",
        "return ()",
        (_TURNS + "within_its_share_a_prefill_goes_before_older_ones_of_who_is_not[fair]",),
    ),
    Mutant(
        "prefills that go first are started first and not gone on with first",
        ("fairness",),
        "scheduling/batch.py",
        "row.branch.request.order not in order.ahead",
        "False",
        (_TURNS + "within_its_share_a_prefill_goes_before_older_ones_of_who_is_not",),
    ),
    Mutant(
        "a tenant runs one request more than its quota",
        ("refusal",),
        "scheduling/roster.py",
        "if n >= (self.tenants[t].max_running or n + 1)",
        "if n > (self.tenants[t].max_running or n + 1)",
        (_FAIR + "a_tenant_runs_no_more_than_its_quota_and_others_pass_it",),
    ),
    Mutant(
        "waiting does not outweigh priority",
        ("bounded waiting",),
        "scheduling/policies/priority.py",
        "return request.arrival + request.priority * self._ageing, request.arrival, request.order",
        "return request.priority, request.arrival, request.order",
        (_PRIORITY + "waiting_outweighs_priority",),
    ),
)
