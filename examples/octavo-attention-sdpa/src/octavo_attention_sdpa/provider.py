"""The backend's name, its options and what it accepts. Asked before anything is built: imports nothing heavy."""

from __future__ import annotations

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field

KV_DTYPES = ("float32", "bfloat16", "float16")


class SdpaOptions(Options):
    """Config key `plugins.attention.sdpa`."""

    rows_at_once: int = Field(64, ge=1, description="Sequences gathered into one padded call; bounds the copy's memory.")


def accepts(needs: Needs, options: SdpaOptions) -> Accept | Reject:
    kv_dtype = needs.facts["kv_dtype"]
    if kv_dtype not in KV_DTYPES:
        return Reject(f"the KV cache would be {kv_dtype}; this backend stores {', '.join(KV_DTYPES)}")
    for spec in needs.facts["kv_specs"]:
        if spec.kind not in ("full", "window"):
            return Reject(f"a layer has a KV cache of kind {spec.kind!r}; this backend keeps full and window caches")
    if softcap := needs.facts["softcap"]:
        return Reject(f"the model has softcap {softcap:g}, which scaled_dot_product_attention cannot apply")
    if needs.facts["sinks"]:
        return Reject("the model has attention sinks, which scaled_dot_product_attention cannot apply")
    return Accept({"block_sizes": (32, 64, 16, 128)}, "scaled_dot_product_attention runs on any device")


PROVIDER = Provider(
    name="sdpa",
    kind="attention",
    load="octavo_attention_sdpa.backend:SdpaAttention",
    api=1,
    priority=0,
    accepts=accepts,
    options=SdpaOptions,
    summary="torch's scaled_dot_product_attention over gathered blocks",
)
