"""A move between two workers over a perfect link."""

from __future__ import annotations

import numpy as np

from pagedkv.cache import BlockManager
from pagedkv.transfer.actions import Completed, Copy, Park, Released, Resumed, Send, SendData, Write
from pagedkv.transfer.endpoint import Endpoint
from pagedkv.transfer.messages import Hello, MoveId, Naming, pack, unpack
from pagedkv.transfer.payload import as_blocks, filled, store, token_bytes


def hello(worker, size, n, dtype="float32"):
    return Hello(worker, 1, b"m", 2, 1, 3, dtype, size, n)


class W:
    def __init__(self, name, size, n):
        self.m = BlockManager(n, size)
        self.h = hello(name, size, n)
        self.e = Endpoint(self.m, self.h)
        self.kv = np.zeros((n + 1, token_bytes(self.h) * size), np.uint8)

    def read(self, b):
        return self.kv[b]

    def write(self, b, d):
        self.kv[b] = d


def test_smoke():
    ws = {"P": W("P", 4, 8), "D": W("D", 3, 12)}
    p, d = ws["P"], ws["D"]
    toks = np.arange(10, 23, dtype=np.int32)
    s = p.m.open(toks)
    r = p.m.reserve([s], [12])
    view = p.kv.view(np.float32).reshape(9, 2, 2, 4, 1, 3)
    vals = np.random.default_rng(0).random((12, 2, 2, 1, 3), np.float32)
    view[r.slots // 4, :, :, r.slots % 4] = vals
    p.m.commit([s], [toks[:12]])
    mv = MoveId("r", 1)
    log = []

    def run(me, acts):
        for a in acts:
            match a:
                case Send(to, m):
                    run(to, ws[to].e.handle(me, unpack(pack(m)), 0.0))
                case SendData(to, _, blocks):
                    m = filled(a, ws[me].read(blocks))
                    run(to, ws[to].e.handle(me, unpack(pack(m)), 0.0))
                case Write():
                    bad = store(
                        a, as_blocks(a.data, ws[a.worker].h), ws[me].h, ws[a.worker].h, ws[me]
                    )
                    run(me, ws[me].e.written(a.move, bad, 0.0))
                case Copy():
                    raise AssertionError
                case _:
                    log.append((me, a))

    run("P", p.e.start(mv, "D", toks, Naming(), "live", 2, 0.0))
    for _ in range(5):
        if mv in p.e.sender:
            run("P", p.e.progress(mv, s, 0.0))
        if log and isinstance(log[-1][1], Park):
            run("P", p.e.parked(mv, s, b"st", (1,), (False,), 0.0))
    assert isinstance(log[-1][1], Completed), log
    run("D", d.e.own(mv, 0.0))
    assert any(isinstance(a, Released) for _, a in log)
    assert any(isinstance(a, Resumed) for _, a in log)
    d.m.check()
    assert d.m.match(toks).cached_tokens == 12
    q = d.m.open(toks)
    sl = d.m.tables([q]).slots()
    got = d.kv.view(np.float32).reshape(13, 2, 2, 3, 1, 3)[sl // 3, :, :, sl % 3]
    assert (got == vals).all()
    d.m.close(q)
    d.e.admitted(mv, 0.0)
    p.m.close(s)
