"""PAGEDKV_ISA forces the path of every native kernel, or is refused by name."""

from __future__ import annotations

import pytest
from tables import spec_of

from pagedkv.attention.backends import choose_backend, make_backend
from pagedkv.attention.isa import ISA_VARIABLE, available_isas, chosen_isa, forced_isa
from pagedkv.attention.native import NativeBackend, import_native
from pagedkv.errors import ConfigError

NATIVE = import_native()


@pytest.mark.parametrize("value", [None, "", "auto"])
def test_without_it_the_best_is_taken(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(ISA_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(ISA_VARIABLE, value)
    assert forced_isa(NATIVE) is None
    assert chosen_isa(NATIVE) == NATIVE.available_isas()[-1]
    backend = make_backend("native", spec_of())
    assert isinstance(backend, NativeBackend) and backend.isa == NATIVE.available_isas()[-1]


@pytest.mark.parametrize("isa", available_isas(NATIVE))
def test_it_forces_a_path(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    assert forced_isa(NATIVE) == chosen_isa(NATIVE) == isa
    backend = make_backend("native", spec_of())
    assert isinstance(backend, NativeBackend)
    assert backend.isa == isa
    assert f"({isa}): " in choose_backend()[1]
    assert choose_backend()[1].endswith(f"; {ISA_VARIABLE}={isa}")


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
