"""Settings: four layers, where each value came from, and what is refused with its place."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pagedkv.attention.backends import BACKENDS
from pagedkv.engine.arguments import make_llm
from pagedkv.engine.llm import DTYPES, LLM
from pagedkv.engine.tiers import TierConfig
from pagedkv.errors import ConfigError
from pagedkv.models.native import KERNELS
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.tenants import Tenant
from pagedkv.server.layers import (
    FOREIGN,
    Loaded,
    load_settings,
    scalar_names,
    section_of,
    variable,
)
from pagedkv.server.print_settings import as_toml, toml_value
from pagedkv.server.settings import EngineSettings, ServeSettings

HASH = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def load(
    file: Path | None = None,
    text: str | None = None,
    environ: Mapping[str, str] | None = None,
    **flags: object,
) -> Loaded:
    if text is not None:
        assert file is not None
        file.write_text(text)
    return load_settings(file, environ or {}, flags)


def refused(match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ConfigError) as error:
        load(*args, **kwargs)
    assert re.search(match, str(error.value)), str(error.value)


def test_the_defaults_are_safe() -> None:
    loaded = load()
    server, engine = loaded.settings.server, loaded.settings.engine
    assert (server.host, server.cors_origins, server.api_key) == ("127.0.0.1", (), ())
    assert engine.max_num_waiting == 1024 and engine.max_waiting_tokens is not None
    assert loaded.origin("server", "host") == "default"


def test_each_layer_outweighs_the_one_below(file: Path) -> None:
    text = "[engine]\nblock_size = 8\nnum_blocks = 10\nmax_num_seqs = 5\n"
    environ = {"PAGEDKV_NUM_BLOCKS": "20", "PAGEDKV_MAX_NUM_SEQS": "6"}
    loaded = load(file, text, environ, max_num_seqs="7")
    engine = loaded.settings.engine
    assert (engine.block_size, engine.num_blocks, engine.max_num_seqs) == (8, 20, 7)
    assert loaded.origin("engine", "block_size") == f"{file}: engine.block_size"
    assert loaded.origin("engine", "num_blocks") == "PAGEDKV_NUM_BLOCKS"
    assert loaded.origin("engine", "max_num_seqs") == "--max-num-seqs"
    assert loaded.origin("engine", "seed") == "default"


def test_the_file_can_be_named_by_a_variable(file: Path) -> None:
    file.write_text("[server]\nport = 1\n")
    other = file.with_name("other.toml")
    environ = {"PAGEDKV_CONFIG": str(file)}
    assert load(None, environ=environ).settings.server.port == 1
    assert load(other, "[server]\nport = 2\n", environ).settings.server.port == 2
    assert load(None, environ={"PAGEDKV_CONFIG": ""}).settings.server.port == 8000


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kv_cache_memory", "64MiB", 64 * 2**20),
        ("kv_cache_memory", "none", None),
        ("max_num_waiting", "none", None),
        ("drain_timeout", "0", 0.0),
        ("dashboard", "false", False),
        ("dashboard", "0", False),
        ("served_model_name", "a,b", ("a", "b")),
        ("disk_folder", "/x/y", Path("/x/y")),
        ("host_memory", "1GB", 10**9),
        ("seed", "-3", -3),
        ("watermark", "0.25", 0.25),
    ],
)
def test_text_becomes_the_type_of_the_setting(name: str, text: str, value: object) -> None:
    loaded = load(environ={variable(name): text})
    assert getattr(getattr(loaded.settings, section_of(name)), name) == value


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("[server]\nport = '8000'", r"server\.port='8000' must be a valid integer"),
        ("[server]\nport = 70000", r"server\.port=70000 must be less than or equal to 65535"),
        ("[server]\nport = true", r"server\.port=True must be a valid integer"),
        ("[server]\ndashboard = 1", r"server\.dashboard=1 must be a valid boolean"),
        ("[server]\nhost = 2024-01-01", r"server\.host=.* must be a valid string"),
        ("[server]\ndrain_timeout = nan", r"server\.drain_timeout=nan must be a finite number"),
        ("[server]\nprot = 1", r"server\.prot is no setting: did you mean port\?"),
        ("[server]\nmax_n = 100000", r"server\.max_n=100000 must be less than or equal to 256"),
        ("server = 3", r": server=3 must be a table: write \[server\]"),
        ("[sever]\n", r": sever is no setting: did you mean server\?"),
        ("[engine]\nblock_size = 1.5", r"engine\.block_size=1\.5 must be a valid integer"),
        ("[engine]\nkv_cache_memory = 'much'", r"engine\.kv_cache_memory='much' is not a size"),
        ("[engine]\npolicy = 'lifo'", r"engine\.policy='lifo': use one of fcfs"),
        ("[engine]\nwatermark = 2.0", r"engine\.watermark=2\.0 must be a number from 0 to 1"),
        ("[engine]\ndecisions_kept = -1", r"engine\.decisions_kept=-1 must be an integer from 0"),
        ("[engine]\nswap_space = 4", r"engine\.swap_space is no setting .*: use host_memory$"),
        ("[engine]\nwrite_through = true", r"write_through=True writes to the disk"),
        ("[engine]\ndisk_memory = 4", r"disk_memory=4 is the size of a folder"),
        ("[tenants.a]\nweight = 0", r"tenants\.a\.weight=0 must be greater than or equal"),
        ("[tenants.a]\nwieght = 1", r"tenants\.a\.wieght is no setting: did you mean weight\?"),
        ("[tenants]\na = 2", r"tenants\.a=2 must be a table: write \[tenants\.a\]"),
        ("[tenants.' ']\n", r"the name ' ' is empty"),
        ("[tenants.a]\nslo_class = 'x'", r"tenants\.a\.slo_class='x' is not among slo_classes"),
        (
            f"[tenants.a]\nkey_hashes = ['{HASH}']\n[tenants.b]\nkey_hashes = ['{HASH}']",
            r"tenants 'a' and 'b' have a key in common",
        ),
        ("[slo_classes.a]\nttft_slo_ms = 0", r"slo_classes\.a\.ttft_slo_ms=0 must be greater"),
        ("[slo_classes.a]\npriority = 1001", r"priority=1001 must be less than or equal to 1000"),
        ("public_prefixes = 'x'", r"public_prefixes must be a list"),
        ("[[public_prefixes]]\ntext = 'a'\nfile = 'b'", r"public_prefixes\[0\] takes a text or a"),
        ("[[public_prefixes]]\nfile = '/no/such'", r"the file '/no/such' cannot be read"),
        ("[server\n", r"is not TOML: .*line 1"),
        ("a=" + "[" * 5000, "is not TOML: maximum recursion depth"),
        ('[server]\nhost = ""', r"server\.host='' must have at least 1 character"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(file: Path, table: str, place: str) -> None:
    refused(place, file, table)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    refused("the file '.*nowhere' cannot be read: No such file", tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"# \xe4")
    refused("latin is not TOML", tmp_path / "latin")


def test_what_is_wrong_in_the_environment_is_named() -> None:
    refused(
        r"^the variable PAGEDKV_PROT is no setting: did you mean PAGEDKV_PORT\?$",
        environ={"PAGEDKV_PROT": "1"},
    )
    refused(r"PAGEDKV_PORT='x' must be a valid integer", environ={"PAGEDKV_PORT": "x"})
    refused("PAGEDKV_SWAP_SPACE .*: use PAGEDKV_HOST_MEMORY$", environ={"PAGEDKV_SWAP_SPACE": "4"})


def test_variables_with_another_meaning_are_let_be() -> None:
    load(
        environ={
            "PAGEDKV_NUM_THREADS": "2",
            "PAGEDKV_TRACES": "/t",
            "PAGEDKV_PEERS": "/p",
            "PAGEDKV_REQUIRE_NATIVE": "1",
            "PAGEDKV_CACHE": "/c",
            "PAGEDKV_ISA": "avx2",
            "PATH": "/bin",
        }
    )
    assert load(environ={"PAGEDKV_SANITIZE": "1"}).settings.engine.sanitize
    assert not load(environ={"PAGEDKV_SANITIZE": ""}).settings.engine.sanitize


def test_a_kubernetes_service_of_our_name_sets_nothing() -> None:
    loaded = load(
        environ={
            "PAGEDKV_SERVICE_HOST": "10.0.0.1",
            "PAGEDKV_SERVICE_PORT": "80",
            "PAGEDKV_SERVICE_PORT_HTTP": "80",
            "PAGEDKV_PORT": "tcp://10.0.0.1:80",
            "PAGEDKV_PORT_80_TCP": "tcp://10.0.0.1:80",
            "PAGEDKV_PORT_80_TCP_ADDR": "10.0.0.1",
        }
    )
    assert loaded.settings.server.port == 8000
    assert not loaded.origins


def test_names_of_other_servers_lead_to_ours() -> None:
    names = scalar_names()
    assert {instead for _, instead in FOREIGN.values()} <= {*names, None}
    assert not set(FOREIGN) & set(names)


def test_what_is_printed_can_be_read_again(file: Path) -> None:
    text = (
        (
            "[server]\nserved_model_name = ['a', 'q\"\\\\']\nrequest_timeout = 3\n"
            "[engine]\nmax_num_waiting = 'none'\nhost_memory = '1GiB'\nrecord = 'r\\u007f.jsonl'\n"
            f"[tenants.'ä b']\nkey_hashes = ['{HASH}']\nslo_class = 'fast'\n[tenants.c]\n"
            "[slo_classes.fast]\nttft_slo_ms = 200\n"
            "[[public_prefixes]]\ntext = 'You are\\nkind.'\n"
        )
        .replace("'r\\u007f.jsonl'", '"r\\u007f.jsonl"')
        .replace("'You are\\nkind.'", '"You are\\nkind."')
    )
    loaded = load(file, text, {"PAGEDKV_PORT": "9"}, seed="5")
    printed = as_toml(loaded)
    again = load(file, printed)
    assert again.settings == loaded.settings
    assert f"# {file}: tenants.ä b.slo_class" in printed
    assert "port = 9  # PAGEDKV_PORT\n" in printed
    assert "seed = 5  # --seed\n" in printed
    assert 'host = "127.0.0.1"  # default\n' in printed
    for name in scalar_names():
        assert re.search(rf"^(# )?{name}\b", printed, re.M), name


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))).map(tuple),
)


@given(values)
def test_any_value_is_read_from_toml_as_it_was_written(value: object) -> None:
    read = tomllib.loads(f"x = {toml_value(value)}")["x"]
    want = "none" if value is None else list(value) if isinstance(value, tuple) else value
    assert read == want and type(read) is type(want)


def test_keys_are_never_shown(file: Path) -> None:
    loaded = load(file, "", {"PAGEDKV_API_KEY": "first-secret,second-secret"})
    assert len(loaded.settings.server.api_key) == 2
    printed = as_toml(loaded)
    assert "# api_key: 2 given by PAGEDKV_API_KEY, not shown" in printed
    everything = [printed, repr(loaded), str(loaded.settings), loaded.settings.model_dump_json()]
    everything.append(json.dumps(loaded.settings.core_arguments()))
    assert "secret" not in " ".join(everything).replace("SecretStr", "")


@pytest.mark.parametrize(
    "table",
    ["[server]\napi_key = ['a-secret']", "[tenants.a]\nkey_hashes = ['a-secret']"],
)
def test_a_key_in_a_file_is_refused_and_not_shown(file: Path, table: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(file, table)
    assert "secret" not in str(error.value)
    assert re.search(r"(api_key|key_hashes)", str(error.value))


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n"])
def test_a_key_that_anyone_could_send_is_refused(key: str) -> None:
    refused("^--api-key: a key must be text without white space", api_key=[key])
    assert load(api_key=["a,b"]).settings.server.api_key[0].get_secret_value() == "a,b"
    refused("^PAGEDKV_API_KEY: a key must be text", environ={"PAGEDKV_API_KEY": "a,,b"})


@pytest.mark.parametrize(
    "url", ["http://user:secret@host:4318", "https://secret@host", "secret", "ftp://secret"]
)
def test_the_address_of_spans_holds_no_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint: ") as error:
        load(otlp_traces_endpoint=url)
    assert "@" not in str(error.value) and "user" not in str(error.value)
    assert load(otlp_traces_endpoint="http://h:1/v1").settings.server.otlp_traces_endpoint


def test_the_engine_has_every_setting_of_an_llm() -> None:
    ours = set(EngineSettings.model_fields)
    llm = set(inspect.signature(LLM.__init__).parameters) - {"self"}
    assert llm - {"scheduling", "public_prefixes", "tiers", "max_moves", "engines"} <= ours
    tiers = {field.name for field in dataclasses.fields(TierConfig)}
    assert tiers <= ours
    scheduler = {field.name for field in dataclasses.fields(SchedulerConfig)}
    elsewhere = {"eos_token_ids", "vocab_size", "public_prefixes", "tenants", "default_tenant"}
    assert scheduler - elsewhere <= ours
    assert ours - llm - tiers - scheduler == {"decisions_kept"}
    fields = EngineSettings.model_fields
    assert set(get_args(fields["dtype"].annotation)) == set(DTYPES)
    assert set(get_args(fields["attention_backend"].annotation)) == {"auto", *BACKENDS}
    assert get_args(fields["kernels"].annotation) == KERNELS


def test_an_llm_can_be_made_of_them(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("pagedkv.engine.arguments.LLM", lambda **given: made.append(given))
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("Once")
    text = (
        "[engine]\npolicy = 'fair'\ndecisions_kept = 7\nhost_memory = 100\n"
        f"disk_folder = '{tmp_path}'\n"
        "[tenants.a]\nweight = 2\nmax_running = 3\nslo_class = 's'\n[slo_classes.s]\n"
        f"[[public_prefixes]]\nfile = '{prefix}'\n"
    )
    make_llm(json.loads(json.dumps(load(file, text).settings.core_arguments())))
    [arguments] = made
    inspect.signature(LLM.__init__).bind(None, **arguments)
    assert arguments["tiers"] == TierConfig(100, str(tmp_path), 2**30)
    assert arguments["scheduling"]["tenants"] == {"a": Tenant(2.0, max_running=3)}
    assert arguments["scheduling"]["decision_log"] == 7
    assert arguments["decision_log"] is None
    assert arguments["public_prefixes"] == ["Once"]
    make_llm(load().settings.core_arguments())
    assert made[1]["tiers"] is None


def test_a_tenant_without_a_class_is_promised_nothing(file: Path) -> None:
    text = "[tenants.a]\nslo_class = 's'\n[slo_classes.s]\ndeadline_ms = 5\n"
    settings = load(file, text).settings
    assert settings.slo_of("a").deadline_ms == 5
    assert settings.slo_of("b").deadline_ms is None


def test_settings_do_not_change() -> None:
    settings = ServeSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.server.port = 3
