"""Every setting of the server: its name, type, default and meaning.

The layers that give the values are read in `layers`. What stands here is plain data; it travels to
the engine's process as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from pagedkv.errors import ConfigError
from pagedkv.scheduling.config import ADMISSIONS, MAX_NUM_SEQS
from pagedkv.scheduling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOPS
from pagedkv.scheduling.policies import POLICIES
from pagedkv.scheduling.validate import MAX_PRIORITY
from pagedkv.server.setting_types import (
    Count,
    FilePath,
    KeyHash,
    Keys,
    Maybe,
    Seconds,
    Size,
    Texts,
    Url,
    ZmqEndpoint,
    flags,
    scheduling,
)

Role = Literal["prefill", "decode", "both"]

# The tenant of `--api-key`, and of all requests while no key is set.
DEFAULT_TENANT = "default"
_DISK_MEMORY = 2**30
_RAY_ADDRESS = re.compile(r"auto|([^\s:/]+|\[[\w:.%]+\]):[1-9]\d{0,4}")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServerSettings(_Section):
    """The HTTP side."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,  # the system takes "" for every address that it has
        description="Address to listen at. Anything but 127.0.0.1 opens the server to others.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    uds: Maybe[FilePath] = Field(
        default=None, description="Unix socket to listen at instead of a port."
    )
    served_model_name: Texts = Field(
        default=(),
        description="Names under which clients ask for the model. none: what `model` says.",
    )
    api_key: Keys = Field(
        default=(),
        description=f'Keys of the tenant "{DEFAULT_TENANT}", in clear: by flag or variable only. '
        "Others see the flags of a process; prefer the variable, or key_hashes of a tenant.",
    )
    max_body_bytes: Size = Field(default=4 * 2**20, description="Most bytes of a request's body.")
    max_header_bytes: Size = Field(
        default=64 * 2**10, description="Most bytes of a request's headers."
    )
    max_prompts: Count = Field(default=64, description="Most prompts of one completion request.")
    max_n: int = Field(
        default=128,
        ge=1,
        le=MAX_N,
        description="Largest n of a request, and most beams of a search.",
    )
    max_logprobs: int = Field(
        default=20, ge=0, le=MAX_LOGPROBS, description="Most alternatives reported beside a token."
    )
    max_stop: int = Field(
        default=16, ge=0, le=MAX_STOPS, description="Most stop strings of a request."
    )
    max_logit_bias: int = Field(
        default=1024, ge=0, le=MAX_LOGIT_BIAS, description="Most tokens that a request may bias."
    )
    reader_timeout: Seconds = Field(
        default=30.0,
        description="Seconds after which a client that does not read its stream is cut off and its "
        "blocks are freed.",
    )
    request_timeout: Maybe[Seconds] = Field(
        default=None,
        description="Seconds after which a request ends that brings no deadline of its own.",
    )
    drain_timeout: Annotated[float, Field(ge=0, le=1e9)] = Field(
        default=30.0,
        description="Seconds that running requests have to finish after SIGTERM.",
    )
    watchdog_after: Seconds = Field(
        default=60.0,
        description="Seconds after which a step is reported with a dump of the state, and /ready "
        "answers 503.",
    )
    cors_origins: Texts = Field(
        default=(),
        description="Origins whose pages may use the API from a browser. none: no CORS headers.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged: debug, info, warning or error."
    )
    engine_process: bool = Field(
        default=True,
        description="Run the engine in a process of its own, so that the server answers during "
        "long steps.",
    )
    dashboard: bool = Field(default=True, description="Serve the live page at /dashboard.")
    metrics: bool = Field(default=True, description="Serve Prometheus metrics at /metrics.")
    max_tenant_labels: int = Field(
        default=20,
        ge=0,
        le=10_000,
        description='Most tenants with metrics of their own; the others are one, "other".',
    )
    otlp_traces_endpoint: Maybe[Url] = Field(
        default=None, description="URL to which OpenTelemetry spans go. none: no spans."
    )
    kv_events_endpoint: Maybe[ZmqEndpoint] = Field(
        default=None,
        description="ZeroMQ address, such as tcp://127.0.0.1:5557, where the engine publishes what "
        "its cache does, for routers that read vLLM's KV events. none: nowhere.",
    )
    kv_events_topic: str = Field(default="", description="Topic of those messages.")


class EngineSettings(_Section):
    """The engine: what `LLM` takes, and how requests are scheduled."""

    model: str = Field(
        default="smollm2-135m-instruct",
        description="Embedded model, Hugging Face folder, or hub id.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto (the checkpoint's own), float32 or bfloat16."
    )
    device: str = Field(default="cpu", description="Where torch computes.")
    block_size: Count = Field(default=16, description="Tokens a block.")
    num_blocks: Maybe[Count] = Field(
        default=None,
        description="Blocks of the pool, of each worker's where there are several. none: as many "
        "as kv_cache_memory holds.",
    )
    kv_cache_memory: Annotated[Maybe[Size], flags("--kv-memory", "--kv-cache-memory")] = Field(
        default=None,
        description="Memory of the pool, likewise: bytes, 512MiB, 2GB. none: a share of what is "
        "available, which the workers of one machine divide.",
    )
    preallocate: bool = Field(
        default=False,
        description="Take the pool's memory at the start, not as blocks are first used.",
    )
    max_model_len: Maybe[Annotated[int, Field(ge=2, lt=2**31)]] = Field(
        default=None,
        description="Most tokens of prompt and output together. none: the model's own.",
    )
    max_num_seqs: int = Field(
        default=256, ge=1, le=MAX_NUM_SEQS, description="Most samples that run at once."
    )
    max_num_batched_tokens: Count = Field(default=512, description="Tokens of a step.")
    enable_prefix_caching: Annotated[
        bool,
        flags(
            "--enable-prefix-caching/--no-prefix-caching",
            "--prefix-caching/--no-enable-prefix-caching",
        ),
    ] = Field(default=True, description="Reuse the K/V of prompts with the same beginning.")
    attention_backend: Annotated[
        Literal["auto", "native", "gather", "reference"],
        flags("--backend", "--attention-backend"),
    ] = Field(default="auto", description="Attention: auto, native, gather or reference.")
    kernels: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="Layers around attention: native, torch, or auto (native where built).",
    )
    deterministic: bool = Field(default=False, description="The same bits whatever else runs.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = Field(
        default=0, description="From it the seeds of requests that bring none are drawn."
    )
    sanitize: bool = Field(default=False, description="Check every use of a block. Slower.")
    replay_log: Maybe[FilePath] = Field(
        default=None,
        description="With sanitize: file for the calls before an error; of a worker FILE.worker-0 "
        "and so on.",
    )
    decision_log: Maybe[FilePath] = Field(
        default=None,
        description="File for the scheduler's decisions, for `pagedkv explain`; of a worker "
        "FILE.worker-0 and so on.",
    )
    record: Maybe[FilePath] = Field(
        default=None,
        description="File for the run, prompts included, for `pagedkv simulate replay`.",
    )
    host_memory: Annotated[Size, flags("--host-tier", "--host-memory")] = Field(
        default=0, description="Host memory for blocks that leave the pool; 0 for none."
    )
    disk_folder: Annotated[Maybe[FilePath], flags("--disk-tier", "--disk-folder")] = Field(
        default=None, description="Folder for them that outlives the process."
    )
    disk_memory: Annotated[Maybe[Size], flags("--disk-tier-size", "--disk-memory")] = Field(
        default=None, description="Most bytes in that folder. none: 1GiB."
    )
    write_through: bool = Field(
        default=False, description="Store blocks on the disk at once, with fsync."
    )
    policy: Annotated[str, scheduling("policy"), flags("--policy", "--scheduling-policy")] = Field(
        default="fcfs", description=f"Who is served first: {', '.join(POLICIES)}."
    )
    admission: Annotated[str, scheduling("admission")] = Field(
        default="prompt",
        description=f"What has to fit before a request starts: {', '.join(ADMISSIONS)}.",
    )
    admission_quantile: Annotated[float, scheduling("admission_quantile")] = Field(
        default=0.9, description="With expected_peak: how long outputs are expected to be."
    )
    watermark: Annotated[float, scheduling("watermark")] = Field(
        default=0.0, description="Share of the pool that a start leaves free."
    )
    max_num_waiting: Annotated[Maybe[int], scheduling("max_num_waiting")] = Field(
        default=1024,
        description="Samples of requests that may wait; more get 429. none: no bound.",
    )
    max_waiting_tokens: Annotated[Maybe[int], scheduling("max_waiting_tokens")] = Field(
        default=262_144, description="Prompt tokens that may wait, likewise. none: no bound."
    )
    recovery: Annotated[str, scheduling("recovery")] = Field(
        default="auto", description="How preempted requests come back: auto, swap or recompute."
    )
    overload: Annotated[str, scheduling("overload")] = Field(
        default="best_effort",
        description="Requests whose first token cannot come in time: best_effort (served when "
        "nobody else is) or reject.",
    )
    ageing: Annotated[float, scheduling("ageing")] = Field(
        default=60.0, description="Seconds of waiting that outweigh a step in priority."
    )
    urgent_slack: Annotated[float, scheduling("urgent_slack")] = Field(
        default=1.0,
        description="With fair+deadline: seconds to its start at which a request is urgent.",
    )
    urgent_service: Annotated[float, scheduling("urgent_service")] = Field(
        default=4096.0,
        description="With fair+deadline: service by which its tenant may then be ahead.",
    )
    decisions_kept: Annotated[int, scheduling("decision_log")] = Field(
        default=4096,
        description="Decisions kept in memory, of which the dashboard shows the last; 0 for none.",
    )

    @field_validator("policy")
    @classmethod
    def _policy_exists(cls, value: str) -> str:
        if value not in POLICIES:
            raise ConfigError(f"policy={value!r:.200}: use one of {', '.join(POLICIES)}")
        return value


class ClusterSettings(_Section):
    """The engine on several workers; without them it is one, in the server's own host."""

    workers: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Workers that are alike and share the requests. 0: none.",
    )
    prefill_workers: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Workers that compute prompts and give them to those that decode. 0: none.",
    )
    decode_workers: int = Field(
        default=0, ge=0, le=1000, description="Workers that draw the further tokens. 0: none."
    )
    ray_address: Maybe[str] = Field(
        default=None,
        description="Ray cluster for the workers, such as 10.0.0.1:6379, or auto. none: Ray is "
        "started on this machine, for this server alone.",
    )
    worker_threads: Maybe[Annotated[int, Field(ge=1, le=4096)]] = Field(
        default=None,
        description="Threads of each worker; with ray_address Ray keeps as many CPUs for it. none: "
        "workers share the cores of the machine, or of the cluster's nodes.",
    )
    flip_roles_after: Maybe[Annotated[float, Field(gt=0, le=3600)]] = Field(
        default=5.0,
        description="Seconds that prefill or decode workers are too few, while the others could "
        "spare one, before that one changes its role; then not again for twelve times as long. "
        "none: roles stay.",
    )

    def roles(self) -> dict[str, Role]:
        """The role of each worker, by its name; none without a cluster."""
        counts: dict[Role, tuple[str, int]] = {
            "both": ("worker", self.workers),
            "prefill": ("prefill", self.prefill_workers),
            "decode": ("decode", self.decode_workers),
        }
        return {f"{name}-{i}": role for role, (name, count) in counts.items() for i in range(count)}


class SloClass(_Section):
    """What requests are promised that bring no wishes of their own."""

    ttft_slo_ms: Maybe[Annotated[float, Field(gt=0, le=1e12)]] = Field(
        default=None, description="Milliseconds to the first token."
    )
    tpot_slo_ms: Maybe[Annotated[float, Field(gt=0, le=1e12)]] = Field(
        default=None, description="Milliseconds a further token."
    )
    deadline_ms: Maybe[Annotated[float, Field(gt=0, le=1e12)]] = Field(
        default=None, description="Milliseconds to the end of the request."
    )
    priority: int = Field(
        default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower is served earlier."
    )


class TenantSettings(_Section):
    """A tenant: who it is, and what it is granted."""

    key_hashes: tuple[KeyHash, ...] = Field(
        default=(), description="Hashes of its keys, as `pagedkv key new` prints them."
    )
    weight: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="Its part of the service, under fair policies."
    )
    max_running: Maybe[Count] = Field(default=None, description="Most requests that have started.")
    max_waiting: Maybe[Count] = Field(default=None, description="Most requests that wait.")
    max_waiting_tokens: Maybe[Count] = Field(
        default=None, description="Most prompt tokens that wait."
    )
    slo_class: Maybe[str] = Field(
        default=None, description="The class of its requests that bring no wishes of their own."
    )

    def granted(self) -> dict[str, Any]:
        """The fields of the `Tenant` that the scheduler is told of."""
        return self.model_dump(exclude={"key_hashes", "slo_class"})


class PublicPrefix(_Section):
    """A beginning of prompts whose K/V all tenants share: a text, or a file that holds it.

    For chats it is written as the model's chat template renders it, and ends where a token ends.
    """

    text: Maybe[str] = Field(default=None, description="The beginning itself.")
    file: Maybe[FilePath] = Field(default=None, description="A UTF-8 file that holds it.")

    def content(self) -> str:
        """The text. ConfigError if the file cannot be read."""
        if self.file is None:
            return self.text or ""
        try:
            return self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"public_prefixes: the file {str(self.file)!r} cannot be read: {error}"
            ) from error


class ServeSettings(_Section):
    """All of them. ValidationError (pydantic) if they cannot be together."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    cluster: ClusterSettings = ClusterSettings()
    tenants: Mapping[str, TenantSettings] = Field(default_factory=dict)
    slo_classes: Mapping[str, SloClass] = Field(default_factory=dict)
    public_prefixes: tuple[PublicPrefix, ...] = ()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for check in (
            _check_tenants,
            _check_tiers,
            _check_prefixes,
            _check_events,
            _check_cluster,
        ):
            check(self)
        return self

    def slo_of(self, tenant: str) -> SloClass:
        """What the tenant's requests are promised that bring no wishes of their own."""
        settings = self.tenants.get(tenant, TenantSettings())
        return SloClass() if settings.slo_class is None else self.slo_classes[settings.slo_class]

    def core_arguments(self) -> dict[str, Any]:
        """What the core's process is told, as plain values: see `engine.arguments.make_llm`.

        Keys, and what else is the server's alone, are not among them. ConfigError: see `content`.
        """
        given = self.engine.model_dump(mode="json")
        limits = {name: given.pop(name) for name in _SCHEDULING}
        limits["decision_log"] = given.pop("decisions_kept")
        limits["tenants"] = {name: one.granted() for name, one in self.tenants.items()}
        tiers = {name: given.pop(name) for name in _TIERS}
        if tiers["disk_folder"] is None:
            tiers["disk_memory"] = 0
        elif tiers["disk_memory"] is None:
            tiers["disk_memory"] = _DISK_MEMORY
        return {
            **given,
            "scheduling": limits,
            "tiers": tiers if tiers["host_memory"] or tiers["disk_folder"] else None,
            "public_prefixes": [prefix.content() for prefix in self.public_prefixes],
        }

    def model_names(self) -> tuple[str, ...]:
        """The names by which clients ask for the model."""
        return self.server.served_model_name or (self.engine.model,)


_TIERS = ("host_memory", "disk_folder", "disk_memory", "write_through")
_SCHEDULING = (
    "policy",
    "admission",
    "admission_quantile",
    "watermark",
    "max_num_waiting",
    "max_waiting_tokens",
    "recovery",
    "overload",
    "ageing",
    "urgent_slack",
    "urgent_service",
)


def _check_tenants(settings: ServeSettings) -> None:
    owner: dict[str, str] = {}
    for name, tenant in settings.tenants.items():
        if not name.strip():
            raise ConfigError(f"tenants: the name {name!r} is empty: give each tenant a name")
        if tenant.slo_class is not None and tenant.slo_class not in settings.slo_classes:
            raise ConfigError(
                f"tenants.{name}.slo_class={tenant.slo_class!r:.200} is not among slo_classes: "
                f"{', '.join(settings.slo_classes) or 'there are none'}"
            )
        for digest in tenant.key_hashes:
            if owner.setdefault(digest, name) != name:
                raise ConfigError(
                    f"tenants {owner[digest]!r} and {name!r} have a key in common: give each key "
                    "to one tenant"
                )


def _check_tiers(settings: ServeSettings) -> None:
    engine = settings.engine
    if engine.disk_folder is None:
        if engine.disk_memory is not None:
            raise ConfigError(
                f"disk_memory={engine.disk_memory} is the size of a folder: set disk_folder"
            )
        if engine.write_through:
            raise ConfigError("write_through=True writes to the disk: set disk_folder")


def _check_prefixes(settings: ServeSettings) -> None:
    for i, prefix in enumerate(settings.public_prefixes):
        if (prefix.text is None) == (prefix.file is None):
            raise ConfigError(f"public_prefixes[{i}] takes a text or a file: give one of the two")


def _check_events(settings: ServeSettings) -> None:
    given = settings.server
    if given.kv_events_endpoint is not None and not given.engine_process:
        raise ConfigError(
            f"kv_events_endpoint={given.kv_events_endpoint!r} needs engine_process: events are "
            "published by the engine's own process"
        )
    if given.kv_events_endpoint is not None and settings.cluster.roles():
        raise ConfigError(
            f"kv_events_endpoint={given.kv_events_endpoint!r} is for a single engine: workers tell "
            "their own router what they cache; give one of the two"
        )


def _check_cluster(settings: ServeSettings) -> None:
    given = settings.cluster
    if (given.prefill_workers > 0) != (given.decode_workers > 0):
        raise ConfigError(
            f"prefill_workers={given.prefill_workers} and decode_workers={given.decode_workers} "
            "need each other: give at least 1 of both, or workers alone"
        )
    if given.roles() and not settings.server.engine_process:
        raise ConfigError(
            "engine_process=False: each worker is a process of its own: leave it out, or workers"
        )
    if given.workers and given.prefill_workers:
        raise ConfigError(
            f"workers={given.workers} compute prompts and decode, beside prefill_workers="
            f"{given.prefill_workers} and decode_workers={given.decode_workers}: give workers, or "
            "the other two"
        )
    if given.roles() and not settings.engine.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching=False: workers find the K/V of requests that move to them by "
            "the prefix cache: leave it on, or workers out"
        )
    if given.ray_address is not None and not given.roles():
        raise ConfigError(
            f"ray_address={given.ray_address!r:.200} is where workers run: set workers, or "
            "prefill_workers and decode_workers"
        )
    if given.worker_threads is not None and not given.roles():
        raise ConfigError(
            f"worker_threads={given.worker_threads} is for workers, and there are none: set "
            "PAGEDKV_NUM_THREADS for the threads of a single engine"
        )
    if given.ray_address is not None and not _RAY_ADDRESS.fullmatch(given.ray_address):
        raise ConfigError(
            f"ray_address={given.ray_address!r:.200} is not that of a cluster: give its own, "
            "host:port or auto, and not that of Ray's client server; leave it out to run on this "
            "machine alone"
        )
