"""One OpenMP runtime in the process, and torch's number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from tables import Rows, lay_out

from pagedkv.attention import make_backend
from pagedkv.attention.native import import_native


def in_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_share_the_openmp_runtime_of_torch() -> None:
    code = """
import pagedkv.attention.native as n
n.import_native().max_threads()
from threadpoolctl import threadpool_info
paths = [i["filepath"] for i in threadpool_info() if i["user_api"] == "openmp"]
print(len(paths), "torch" in paths[0])
"""
    assert in_new_process(code) == "1 True"


def test_set_num_threads_of_torch_is_honoured() -> None:
    native = import_native()
    case = lay_out(Rows.random([2000], 8, 2, 64, torch.float32), [1], 16)
    backend = make_backend("native", case.spec)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert native.max_threads() == threads
        assert native.count_threads() == threads
        assert backend.plan(case.batch).tasks.num_threads == threads


def test_little_work_wakes_no_second_thread() -> None:
    torch.set_num_threads(2)
    case = lay_out(Rows.random([10], 2, 1, 8, torch.float32), [1], 16)
    assert make_backend("native", case.spec).plan(case.batch).tasks.num_threads == 1


def test_threads_that_are_not_granted_are_not_waited_for() -> None:
    code = """
import numpy as np, torch
from pagedkv.attention import AttentionBatch, KVSpec, make_backend
torch.set_num_threads(2)
spec = KVSpec(1, 8, 8, 64, 64, 16, torch.float32)
backend = make_backend("native", spec)
tables = np.arange(1, 65, dtype=np.int32)[None]
lens, slots = np.array([1000], np.int32), np.arange(16, 1016)
plan = backend.plan(AttentionBatch(lens, lens, tables, slots))
assert plan.tasks.num_threads == 2
q = torch.zeros(1000, 8, 64)
print(backend.run(plan, 0, q, q, q).sum().item())
"""
    assert in_new_process(code, OMP_THREAD_LIMIT="1") == "0.0"
