"""PAGEDKV_ISA forces the path of every native kernel, or is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tables import spec_of

from pagedkv.attention.backends import choose_backend, make_backend
from pagedkv.attention.isa import (
    ISA_VARIABLE,
    attention_isa,
    available_isas,
    forced_isa,
    linear_isa,
)
from pagedkv.attention.native import NativeBackend, import_native
from pagedkv.errors import ConfigError

NATIVE = import_native()
# A build and a machine with everything, and one where attention lacks what linear layers have.
EVERYTHING = ["scalar", "avx2", "avx512", "avx512bf16"]


def extension(attention: list[str]) -> SimpleNamespace:
    return SimpleNamespace(
        available_isas=lambda: attention, available_linear_isas=lambda: EVERYTHING
    )


@pytest.mark.parametrize("value", [None, "", "auto"])
def test_without_it_each_family_takes_its_best(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(ISA_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(ISA_VARIABLE, value)
    assert forced_isa(NATIVE) is None
    assert attention_isa(NATIVE) == NATIVE.available_isas()[-1]
    assert linear_isa(NATIVE) == NATIVE.available_linear_isas()[-1]
    backend = make_backend("native", spec_of())
    assert isinstance(backend, NativeBackend) and backend.isa == NATIVE.isa()


@pytest.mark.parametrize("isa", available_isas(NATIVE))
def test_it_forces_a_path(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    assert forced_isa(NATIVE) == linear_isa(NATIVE) == isa
    backend = make_backend("native", spec_of())
    assert isinstance(backend, NativeBackend)
    assert backend.isa == attention_isa(NATIVE)
    assert isa.startswith(backend.isa)  # where attention has no path of that name: below it
    assert f"({backend.isa}): " in choose_backend()[1]
    assert choose_backend()[1].endswith(f"; {ISA_VARIABLE}={isa}")


def test_a_family_without_the_path_takes_the_one_below(monkeypatch: pytest.MonkeyPatch) -> None:
    for forced, attention in (("avx512bf16", "avx512"), ("avx512", "avx512"), ("avx2", "avx2")):
        monkeypatch.setenv(ISA_VARIABLE, forced)
        assert attention_isa(extension(EVERYTHING[:3])) == attention
        assert attention_isa(extension(EVERYTHING)) == forced
        assert linear_isa(extension(EVERYTHING[:3])) == forced


def test_every_path_of_attention_can_be_forced() -> None:
    assert set(NATIVE.available_isas()) <= set(available_isas(NATIVE))


def test_an_argument_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, available_isas(NATIVE)[-1])
    backend = make_backend("native", spec_of(), isa="scalar")
    assert isinstance(backend, NativeBackend) and backend.isa == "scalar"


@pytest.mark.parametrize("value", ["avx1024", "AVX2", "neon", " scalar"])
def test_another_value_is_refused_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, value)
    for name in ("auto", "native"):
        with pytest.raises(ConfigError, match=f"PAGEDKV_ISA='{value}': this machine .*scalar"):
            choose_backend(name)
    assert choose_backend("gather")[0] == "gather"  # nothing native in it
