"""EngineConfig and ServerConfig: the only home of option names, defaults and help.

Command-line flags, OCTAVO_* environment variables, the config file's keys, validation and the
tables in docs/ are all generated from these two models. Both are frozen; values derived from
them live in build results, never here.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from octavo.wording import ONE_DEVICE

Auto = Literal["auto"]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _field(default: Any, help: str, *, short: str | None = None, group: str, secret: bool = False, **kw: Any) -> Any:
    extra: dict[str, Any] = {"group": group}
    if short:
        extra["short"] = short
    if secret:
        extra["secret"] = True  # never shown: not in an error, a log line, `doctor` or /admin
    return Field(default, description=help, json_schema_extra=extra, **kw)


class EngineConfig(_Config):
    """Everything that shapes one engine. Field `max_model_len` is the flag `--max-model-len`."""

    model: str = _field("demo", "Folder, GGUF file, hub id, or `demo` (SmolLM2-135M-Instruct).", group="model")
    revision: str | None = _field(None, "Branch, tag or commit of a hub id.", group="model")
    tokenizer: str | None = _field(None, "Folder or hub id of the tokenizer, if not the model's.", group="model")
    chat_template: str | None = _field(None, "File with a Jinja chat template, instead of the model's.", group="model")
    enable_auto_tool_choice: bool = _field(False, "Let the model decide whether to call tools (tool_choice auto).", group="model")
    tool_call_parser: str = _field(
        "auto",
        "How the model writes calls of tools: hermes, llama3_json, deepseek_v3, deepseek_v31, json, or a plugin's; `auto` is what its chat "
        "template shows, or json.",
        group="model",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _field(
        "auto", "Format of the weights; `dummy` fills them with random values.", group="model"
    )
    trust_remote_code: bool = _field(
        False, "Refused: Octavo runs no code from checkpoints. The flag exists to say so.", group="model"
    )
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = _field(
        "auto", "Precision of weights and activations; `auto` is the checkpoint's, or bfloat16 on a CPU that has it for GGUF.",
        group="model",
    )  # fmt: skip
    max_model_len: int | None = _field(
        None, "Longest prompt plus completion, in tokens; default is the model's.", group="model", ge=1
    )
    rope_scaling_factor: float | None = _field(
        None, "Stretch the model's RoPE by this factor: of its own type, dynamic (NTK) where it has none.", group="model", ge=1
    )
    rope_theta: float | None = _field(None, "Base of the model's RoPE, instead of the checkpoint's.", group="model", gt=0)
    quantization: str | None = _field(
        None, "Weight format by name; default is what the checkpoint says.", short="-q", group="model"
    )
    awq_ckpt_path: str | None = _field(
        None, "AWQ checkpoint of MODEL: its weights are served with MODEL's tokenizer and chat template.", group="model"
    )
    seed: int = _field(0, "Seed of the stream that unseeded requests draw from.", group="model", ge=0)

    device: Literal["auto", "cpu", "cuda"] = _field("auto", "Where to run.", group="device")
    num_threads: int | None = _field(None, "CPU threads; default is what the machine can spare.", group="device", ge=1)
    enforce_eager: bool = _field(False, "No captured graphs.", group="device")
    tensor_parallel_size: int = _field(1, "Devices that share each layer: 1 is all there is.", short="-tp", group="device")
    pipeline_parallel_size: int = _field(1, "Devices that share the layers out: 1 is all there is.", short="-pp", group="device")

    block_size: int | Auto = _field("auto", "Tokens per KV block; `auto` asks the model and the backend.", group="cache")
    kv_cache_dtype: str = _field(
        "auto",
        "Precision of the KV cache: `fp8_e4m3`, `fp8_e5m2` or a torch dtype; `auto` is the checkpoint's, else the model's.",
        group="cache",
    )
    kv_cache_spread: Literal["auto", "always", "never"] = _field(
        "auto",
        "Spread queries and keys over the channels of a head before an FP8 cache rounds the keys, which halves the error of scores. "
        "`auto` does so in every FP8 cache but a latent one.",
        group="cache",
    )
    gpu_memory_utilization: float = _field(0.9, "Share of the device's memory to use.", group="cache", gt=0, le=1)
    kv_cache_memory_bytes: int | None = _field(None, "Size of the KV cache, instead of a share of memory.", group="cache", ge=1)
    memory_share: float | None = _field(
        None, "Share of the device's memory for this engine alone (weights, workspace and cache), whatever others hold.",
        group="cache", gt=0, le=1,
    )  # fmt: skip
    reserved_memory_bytes: int = _field(
        0, "Free memory of the device to leave alone; a server adds what its other models were promised.", group="cache", ge=0
    )
    num_gpu_blocks: int | None = _field(
        None, "Hard limit of KV blocks: what does not fit now is refused, not queued.", group="cache", ge=1
    )
    num_gpu_blocks_override: int | None = _field(None, "Number of KV blocks; requests queue as usual.", group="cache", ge=1)
    swap_space: float = _field(
        0.0, "GiB of host memory (pinned for a GPU) for preempted sequences and evicted prefixes, per GPU; 0 is none.",
        group="cache", ge=0,
    )  # fmt: skip
    preemption_mode: Literal["auto", "swap", "recompute"] = _field(
        "auto", "How a preempted sequence continues, with --swap-space: by cost, or always one way.", group="cache"
    )
    dynamic_memory: bool = _field(False, "Let the KV cache grow and shrink while it serves, by how full it is.", group="cache")
    dynamic_memory_interval: float = _field(30.0, "Seconds between two looks at how full it is.", group="cache", gt=0)
    enable_prefix_caching: bool = _field(True, "Reuse the KV of shared prompt prefixes.", group="cache")
    warm_prefixes: str | None = _field(
        None, "File of prompts or conversations (YAML, JSON, or a text a line) to have in the prefix cache before the first request.",
        group="cache",
    )  # fmt: skip

    max_num_seqs: int = _field(256, "Sequences in one step.", group="scheduler", ge=1, le=65536)
    max_num_batched_tokens: int | None = _field(
        None, "Tokens in one step; default 8192 on a GPU, 1024 on a CPU.", group="scheduler", ge=1
    )
    enable_chunked_prefill: bool = _field(True, "Split long prompts over steps.", group="scheduler")
    scheduling_policy: Literal["fcfs", "priority"] = _field("fcfs", "Order of waiting requests.", group="scheduler")
    max_num_queued_reqs: int = _field(4096, "Waiting requests before new ones get 429; 0 is no bound.", group="scheduler", ge=0)

    attention_backend: str = _field("auto", "Attention backend by name.", group="plugins")
    allocator: str = _field("auto", "Block allocator by name.", group="plugins")
    scheduler: str = _field("auto", "Scheduler by name.", group="plugins")
    executor: str = _field("auto", "Executor by name.", group="plugins")
    model_adapter: str = _field("auto", "Model adapter by name.", group="plugins")
    grammar_backend: str = _field(
        "auto", "What enforces JSON schemas and other grammars, by name; `none` refuses them.", group="plugins"
    )
    plugins: dict[str, Any] = _field(
        {}, "Plugin options as JSON: {\"enable\": [distribution, ...], \"<kind>\": {\"<name>\": {option: value}}}.", group="plugins"
    )  # fmt: skip

    @field_validator("tensor_parallel_size", "pipeline_parallel_size")
    @classmethod
    def _one_device(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"must be 1: {ONE_DEVICE}")
        return value

    @field_validator("block_size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or `auto`")
        return value


class ServerConfig(_Config):
    """Everything that shapes the HTTP server around an engine."""

    host: str = _field("127.0.0.1", "Address to listen on.", group="server")
    port: int = _field(8000, "Port to listen on; 0 takes a free one.", group="server", ge=0, le=65535)
    uds: str | None = _field(None, "Unix socket to listen on, instead of host and port.", group="server")
    api_key: tuple[str, ...] = _field((), "Key that clients must send (repeatable).", group="server", secret=True)
    api_keys_file: str | None = _field(
        None, "YAML or JSON file of tenants: names, keys, weights, limits; read again on SIGHUP.", group="server"
    )
    api_keys: str | None = _field(None, "The content of such a file, for OCTAVO_API_KEYS.", group="server", secret=True)
    admin_api_key: tuple[str, ...] = _field(
        (), "Key of the /admin routes (repeatable); without one they are off.", group="server", secret=True
    )
    served_model_name: tuple[str, ...] = _field((), "Name(s) that clients use; default is the model's.", group="server")
    models: tuple[str | dict[str, Any], ...] = _field(
        (), "Further model to serve: NAME=PATH[,SETTING=VALUE...] (repeatable); in the file a list of {name, model, setting: value}.",
        group="server",
    )  # fmt: skip
    warm_up: bool = _field(
        True,
        "Run every engine through steps of many kinds before it serves, so that on a GPU no client waits for a kernel to be compiled or a graph to be captured.",
        group="server",
    )
    max_engine_restarts: int = _field(
        5, "Starts in a row that a crashed engine gets before its model is given up; 0 is none.", group="server", ge=0
    )
    engine_timeout: float = _field(
        300.0,
        "Seconds that an engine may take over one step, kernels compiled in it included, before it counts as hung and is started again; 0 is for ever.",
        group="server",
        ge=0,
    )
    root_path: str = _field("", "Path prefix that a proxy in front takes off again, such as /llm.", group="server")
    allowed_origins: tuple[str, ...] = _field(
        (), "Origin that browsers may ask from (CORS, repeatable): https://chat.example.org, or * for all.", group="server"
    )
    ssl_keyfile: str | None = _field(None, "TLS key file.", group="server")
    ssl_certfile: str | None = _field(None, "TLS certificate file.", group="server")
    ssl_ca_certs: str | None = _field(None, "CA file: client certificates are required.", group="server")
    max_body_bytes: int = _field(8 << 20, "Largest request body.", group="server", ge=1024)
    header_timeout: float = _field(15.0, "Seconds that a client has to send a request's line and headers.", group="server", gt=0)
    body_timeout: float = _field(60.0, "Seconds that a client has to send a request's body.", group="server", gt=0)
    min_priority: int = _field(
        0, "Most urgent priority that clients may ask for (lower runs first); for --scheduling-policy priority.", group="server"
    )
    shutdown_timeout: float = _field(30.0, "Seconds that running requests get to finish after SIGTERM.", group="server", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = _field("info", "How much to log.", group="server")
    log_format: Literal["text", "json"] = _field("text", "Lines for people, or one JSON object a line.", group="server")
    log_file: str | None = _field(None, "File to log to, beside the terminal; it is rotated.", group="server")
    log_file_bytes: int = _field(
        64 << 20, "Size at which the log file is rotated; five old ones are kept.", group="server", ge=4096
    )
    disable_log_requests: bool = _field(False, "No line per request.", group="server")
    log_requests_on_error: bool = _field(
        False, "Log the prompt and the stack of requests that fail; of no others.", group="server"
    )
    disable_log_stats: bool = _field(False, "No periodic line of throughput and cache use.", group="server")
    vllm_metrics: bool = _field(True, "Also export metrics under the names vLLM's dashboards use.", group="server")
    otlp_traces_endpoint: str | None = _field(
        None, "OTLP/HTTP address that traces are sent to (needs octavo[otel]); none are made without it.", group="server"
    )

    @field_validator("root_path")
    @classmethod
    def _prefix(cls, value: str) -> str:
        if value and not re.fullmatch(r"(/[^/\s]+)+", value):
            raise ValueError("must begin with / and not end with it, such as /llm")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin) for origin in value):
            raise ValueError(
                "must be *, or a scheme, a host and perhaps a port, such as https://chat.example.org: no browser sends more"
            )
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://, and be the whole address (http://collector:4318/v1/traces)")
        return value


SECRET_VARIABLES = frozenset(
    f"OCTAVO_{name.upper()}"
    for name, info in ServerConfig.model_fields.items()
    if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("secret")
)
"""Environment variables that hold keys: no process needs them but the server's own."""
