"""Pools of every kind that recipes are made for: engines, layouts, speculation, sides, adapters, shared models."""

from functools import cache
from typing import Any

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Adapter, HostedModel, Pool
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie.port.recipe.recipe import Recipe

BOTH = ("vllm", "sglang")
# name: model, accelerator, engines, what else is asked for.
ASKED: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "plain": ("llama-3.1-70b", "mi300x", BOTH, {"replicas": 10}),
    "quantised-at-load": ("llama-3.1-70b", "mi300x", BOTH, {"precision": "fp8", "kv": "fp8"}),
    "adapters": ("llama-3.1-8b", "h200", BOTH, {"adapters": (Adapter(name="sql", path="/srv/lora/sql"),)}),
    "mtp": ("deepseek-v3", "mi300x", BOTH, {"layout": Parallelism(tp=8), "speculation": "mtp:3"}),
    "attention-parts": ("deepseek-v3", "h200", BOTH, {"layout": Parallelism(dp=8, ep=8)}),
    "wide": ("deepseek-v3", "h200", BOTH, {"layout": Parallelism(dp=16, ep=16), "replicas": 2}),
    "stages": ("llama-3.1-405b", "h100-sxm", BOTH, {"layout": Parallelism(tp=8, pp=2)}),
    "ngram": ("llama-3.3-70b", "h200", BOTH, {"speculation": "ngram:4"}),
    "eagle3": ("llama-3.3-70b", "h200", BOTH, {"speculation": "eagle3:3"}),
    "draft": ("llama-3.3-70b", "h200", BOTH, {"speculation": "draft:4:llama-3.1-8b"}),
    "dspark": ("deepseek-v4-flash", "b200", BOTH, {"speculation": "dspark:5"}),
    "apart-nixl": ("deepseek-r1", "mi355x", ("vllm",), {"apart": "1xTP8:2xTP8", "connector": "vllm-nixl"}),
    "apart-mori": ("deepseek-r1", "mi355x", ("sglang",), {"apart": "1xTP8:2xTP8", "connector": "sglang-mori"}),
    "gguf": ("llama-3.1-8b", "rx-7900-xtx", ("llama.cpp",), {"precision": "q4_k_m"}),
    "gguf-two": ("llama-3.1-8b", "rtx-4090", ("llama.cpp",), {
        "precision": "q4_k_m", "kv": "fp8", "layout": Parallelism(tp=2), "speculation": "ngram:4",
        "adapters": (Adapter(name="sql", path="/srv/lora/sql.gguf"),),
    }),
}  # fmt: skip


def asked(catalog: Catalog, name: str, engine: str) -> tuple[Recipe, ...]:
    model, accelerator, _, more = ASKED[name]
    pool, chosen = asked_pool(catalog, catalog.model(model), catalog.accelerator(accelerator), engine=engine, **more)
    return RecipeBook(catalog, RecipeOptions(chosen=chosen)).recipes(pool)


@cache
def every(catalog: Catalog) -> list[Recipe]:
    found = [one for name, (_, _, engines, _) in ASKED.items() for e in engines for one in asked(catalog, name, e)]
    return [*found, *(one for pool in (sleeping(), routed()) for one in RecipeBook(catalog).recipes(pool))]


def pool(**more: Any) -> Pool:
    """As a fleet file has one."""
    usual: dict[str, Any] = {
        "name": "chat", "model": "llama-3.1-8b", "accelerator": "mi300x", "parallelism": Parallelism(),
        "precision": "native", "kv_format": "bf16", "stack": "vllm", "replicas": 2, "usd_per_gpu_hour": 2.0,
        "max_in_flight": 128, "max_context": 32768,
    }  # fmt: skip
    return Pool(**usual | more)


def sleeping() -> Pool:
    hosts = (HostedModel(model="llama-3.1-8b", precision="native", memory_gib=40, max_context=8192),
             HostedModel(model="qwen3-32b", precision="native", memory_gib=90, max_context=8192))  # fmt: skip
    return pool(name="shared", precision=None, hosts=hosts, loading="vllm-sleep", host_memory_gib=160)


def routed() -> Pool:
    hosts = (HostedModel(model="llama-3.1-8b", precision="q4_k_m", memory_gib=8, max_context=8192),)
    more = {"accelerator": "rx-7900-xtx", "stack": "llama.cpp", "loading": "llamacpp-router", "host_memory_gib": 20}
    return pool(name="gguf", precision=None, hosts=hosts, **more)
