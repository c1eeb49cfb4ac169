"""How the sequences of requests will grow until they end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.lengths import OutputLengths
from pagedkv.scheduling.peak import Growth
from pagedkv.scheduling.request import Output, Request


class Forecast:
    """What outputs will hold: at most, and by what their tenants' outputs were like.

    The token that ends an output is never computed, so an output of L tokens after a prompt of p
    holds p + L - 1.
    """

    def __init__(
        self, manager: BlockManager, config: SchedulerConfig, lengths: OutputLengths
    ) -> None:
        self._manager, self._config, self._lengths = manager, config, lengths
        self._capacity = min(manager.num_blocks, manager.max_blocks_per_seq) * manager.block_size

    def most_tokens(self, request: Request) -> int:
        """Tokens that a sample of the request holds in the end if only its limits end it."""
        most = min(self._config.max_model_len - 1, self._capacity)
        if request.params.max_tokens is not None:
            most = min(most, len(request.prompt) + request.params.max_tokens - 1)
        return max(most, len(request.prompt))

    def most_blocks(self, request: Request) -> int:
        """Blocks that all live samples hold in the end if nothing is shared."""
        return len(request.live) * -(-self.most_tokens(request) // self._manager.block_size)

    def remaining(self, request: Request, output: Output) -> int:
        """Tokens that a live sample is expected to take beyond those that are known."""
        prompt, generated = len(request.prompt), len(output.tokens)
        cap = self.most_tokens(request) - prompt + 1
        expected = self._lengths.expected(
            request.tenant, generated, cap, self._config.admission_quantile
        )
        return max(0, expected - 1 - generated)

    def of_running(self, running: Sequence[Request]) -> list[Growth]:
        """Growth of every live sample. A full block of several is counted with the last to end."""
        size, manager = self._manager.block_size, self._manager
        ranked = []
        for request in running:
            for branch in request.branches:
                left = [(self.remaining(request, o), len(o.tokens)) for o in branch.members]
                ranked.append((sorted(left, reverse=True), branch))
        ranked.sort(key=lambda entry: entry[0][0][0])
        tables = manager.padded_rows(manager.rows([branch.seq for _, branch in ranked]))
        full = np.array([branch.computed // size for _, branch in ranked], np.int64)
        # Of several assignments to one block the last one stays: that of the last to end.
        owner = np.zeros(manager.num_blocks + 1, np.int64)
        owner[tables[np.arange(tables.shape[1]) < full[:, None]]] = np.repeat(
            np.arange(1, len(ranked) + 1), full
        )
        owned = np.bincount(owner[1:], minlength=len(ranked) + 1)[1:]
        growths = []
        for (left, branch), kept in zip(ranked, (owned - full).tolist(), strict=True):
            prompt = len(branch.request.prompt)
            # The first keeps the blocks, the others will have the full ones in common with it.
            growths.append(Growth(prompt + left[0][1], left[0][0], kept))
            growths += [
                Growth(prompt + generated, remaining, -(branch.known // size))
                for remaining, generated in left[1:]
            ]
        return growths

    def of_waiting(self, request: Request, shared: int) -> list[Growth]:
        """Growth of a request whose first `shared` blocks others hold, as long as it runs."""
        size, prompt = self._manager.block_size, len(request.prompt)
        common = (prompt + request.common_output(request.live)) // size
        left = sorted((self.remaining(request, o), len(o.tokens)) for o in request.live)
        growths = [Growth(prompt + known, remaining, -common) for remaining, known in left]
        growths[-1] = growths[-1]._replace(offset=-shared)
        return growths
