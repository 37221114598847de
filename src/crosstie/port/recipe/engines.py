"""What each engine is told, in its own words: one function an engine, from what is known of a pool to its flags."""

import json
from collections.abc import Callable

from crosstie.core.errors import BadInput
from crosstie.core.fleet import BOOTSTRAP_PORT
from crosstie.core.speculation import Speculation
from crosstie.port.recipe.recipe import OWN_ADDRESS, Setting, Started, model_name

# Of an adapter of unknown rank: engines refuse one that is larger than they were started for.
_LORA_RANK = 64
# vLLM's engines meet there to hand a cache over (VLLM_NIXL_SIDE_CHANNEL_PORT, its own default).
_SIDE_CHANNEL = 5600
_HOST = "host_gib_per_gpu: memory of the host for prefixes that the GPU drops"
_GATEWAY_LOADS = "the gateway loads adapters when they are asked for, through the engine's own page"

EngineCommand = tuple[tuple[str, ...], list[Setting], list[str]]


def engine_command(started: Started) -> EngineCommand:
    """The program with its first words, its settings, and what somebody should know."""
    engine = started.deployment.stack.id
    if engine not in _ENGINES:
        known = ", ".join(_ENGINES)
        raise BadInput(f"pool {started.pool.name}: no recipe for {started.deployment.stack.name}; there are {known}")
    if started.pool.host_gib_per_gpu and engine not in ("vllm", "sglang"):
        raise BadInput(f"pool {started.pool.name}: no recipe for host_gib_per_gpu with {started.deployment.stack.name}")
    command, settings, notes = _ENGINES[engine](started)
    unset = "no flag here sets it up; LMCache and the storage backends of HiCache have it"
    slower = [f"{key}: {unset}" for key in ("nvme_gib_per_gpu", "remote_gib") if getattr(started.pool, key)]
    return command, settings, [*notes, *slower]


def _flag(name: str, value: object, why: str) -> Setting:
    return Setting(name=name, value=value if isinstance(value, tuple) else str(value), why=why)


def _switch(name: str, why: str) -> Setting:
    return Setting(name=name, why=why)


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _vllm(started: Started) -> EngineCommand:
    pool, one = started.pool, started.deployment
    split, drafts, stack, memory = one.parallelism, one.speculation, one.stack, one.accelerator.memory_bytes
    notes: list[str] = []
    found = [*_served(started, "--served-model-name")]
    found.append(_flag("--tensor-parallel-size", split.tp, f"{started.chosen}: {split}"))
    if split.pp > 1:
        found.append(_flag("--pipeline-parallel-size", split.pp, f"{started.chosen}: {split}"))
    if split.dp > 1:
        found.append(_flag("--data-parallel-size", split.dp, f"{started.chosen}: attention replicas share the experts"))
    if split.ep > 1:
        found.append(_switch("--enable-expert-parallel", f"{started.chosen}: whole experts on each rank, EP{split.ep}"))
        if split.ep != split.stage_gpus:
            notes.append(f"vLLM spreads experts over all {split.stage_gpus} ranks of a stage, not over {split.ep}")
    found += _quantised(started)
    if one.kv_format == "fp8":
        found.append(_flag("--kv-cache-dtype", "fp8", "kv = fp8: half the cache of 16 bits"))
    found += _context(started, "--max-model-len")
    found.append(_flag("--max-num-seqs", _sequences(started), _why_sequences(started)))
    chunk = int(stack.chunk_tokens_on(memory))
    found.append(_flag("--max-num-batched-tokens", chunk, "prompt tokens a step that predictions count with"))
    used = stack.memory_fraction.value if started.share is None else started.share
    why = "the share of the GPU that `fit` and `plan` count with"
    why = why if started.share is None else "this model's share of a GPU that several models take turns on"
    found.append(_flag("--gpu-memory-utilization", f"{used:.2f}", why))
    if drafts:
        found.append(_flag("--speculative-config", _json(_vllm_drafts(started, drafts)), _why_drafts(drafts)))
    if pool.adapters:
        found += [
            _switch("--enable-lora", "the pool has LoRA adapters"),
            _flag("--max-loras", pool.max_adapters or len(pool.adapters), "adapters that a replica may have at once"),
            _flag("--max-lora-rank", _LORA_RANK, "the largest rank that is let in; lower ones cost as much"),
            _flag("--max-cpu-loras", len(pool.adapters), "the others wait in the host's memory"),
            _flag("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", _GATEWAY_LOADS),
        ]
    if pool.hosts:
        found += [
            _switch("--enable-sleep-mode", "several models take turns on a replica: vLLM's sleep and wake"),
            _flag("VLLM_SERVER_DEV_MODE", "1", "has /sleep and /wake_up, which the gateway calls; let nobody else in"),
        ]
    if pool.host_gib_per_gpu:
        found += [
            _flag("--kv-offloading-size", round(pool.host_gib_per_gpu * split.gpus), f"{_HOST}, of all GPUs together"),
            _flag("--kv-offloading-backend", "native", "vLLM's own, without a further package"),
        ]
    if pool.kv_events:
        found.append(_flag("--kv-events-config", _json(_events(started)), "the gateway follows what caches hold"))
    if started.role:
        assert pool.apart is not None
        _led(started, {"vllm-nixl"})
        config = _json({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        found += [
            _flag("--kv-transfer-config", config, f"disaggregated prefill and decode: {pool.apart.connector}"),
            _flag("VLLM_NIXL_SIDE_CHANNEL_HOST", OWN_ADDRESS, "this machine: the other side asks it for a cache"),
            _flag("VLLM_NIXL_SIDE_CHANNEL_PORT", _SIDE_CHANNEL, "vLLM's own port for that"),
        ]
    return ("vllm", "serve", started.weights), found, notes


def _sglang(started: Started) -> EngineCommand:
    pool, deployment = started.pool, started.deployment
    split, drafts = deployment.parallelism, deployment.speculation
    notes: list[str] = []
    found = [_flag("--model-path", started.weights, "the checkpoint"), *_served(started, "--served-model-name")]
    why = f"{started.chosen}: {split}" + ("; SGLang counts all ranks of a stage" if split.dp > 1 else "")
    found.append(_flag("--tp-size", split.stage_gpus, why))
    if split.pp > 1:
        found.append(_flag("--pp-size", split.pp, f"{started.chosen}: {split}"))
    if split.dp > 1:
        found += [
            _flag("--dp-size", split.dp, f"{started.chosen}: attention replicas share the experts"),
            _switch("--enable-dp-attention", f"{started.chosen}: each of them has its own part of the requests"),
        ]
    if split.ep > 1:
        found.append(_flag("--ep-size", split.ep, f"{started.chosen}: whole experts on each rank"))
    found += _quantised(started)
    if deployment.kv_format == "fp8":
        found.append(_flag("--kv-cache-dtype", "fp8_e4m3", "kv = fp8: half the cache of 16 bits"))
    found += _context(started, "--context-length")
    found.append(_flag("--max-running-requests", pool.max_in_flight, _why_sequences(started)))
    if split.dp == 1:
        chunk = int(deployment.stack.chunk_tokens_on(deployment.accelerator.memory_bytes))
        found.append(_flag("--chunked-prefill-size", chunk, "prompt tokens a step that predictions count with"))
    found.append(_switch("--enable-metrics", "the gateway reads load and cache from /metrics"))
    if pool.host_gib_per_gpu:
        found += [
            _switch("--enable-hierarchical-cache", _HOST),
            _flag("--hicache-size", round(pool.host_gib_per_gpu * 2**30 / 1e9), f"{_HOST}: GB of each rank"),
        ]
    if drafts:
        found += _sglang_drafts(started, drafts)
    if pool.adapters:
        found += [
            _switch("--enable-lora", "the pool has LoRA adapters"),
            _flag("--max-loras-per-batch", pool.max_adapters or len(pool.adapters), "adapters that run at once"),
            _flag("--max-lora-rank", _LORA_RANK, "the largest rank that is let in"),
            _flag("--lora-target-modules", "all", "asked for where no adapter is loaded at the start; "
                  + _GATEWAY_LOADS),
        ]  # fmt: skip
    if pool.kv_events:
        found.append(_flag("--kv-events-config", _json(_events(started)), "the gateway follows what caches hold"))
    if pool.hosts:
        raise BadInput(f"pool {pool.name}: no recipe for several models on replicas of SGLang; vLLM and llama.cpp have")
    if started.role:
        found += _sglang_side(started)
    return ("python3", "-m", "sglang.launch_server"), found, notes


def _sglang_side(started: Started) -> list[Setting]:
    apart = started.pool.apart
    assert apart is not None
    _led(started, {"sglang-mooncake", "sglang-nixl", "sglang-mori"})
    backend = apart.connector.removeprefix("sglang-")
    found = [
        _flag(
            "--disaggregation-mode", started.role, f"disaggregated prefill and decode: this is the {started.role} side"
        ),
        _flag("--disaggregation-transfer-backend", backend, f"the pool's connector: {apart.connector}"),
    ]
    if started.role == "prefill":
        port = apart.prefill.bootstrap_ports[0] if apart.prefill.bootstrap_ports else BOOTSTRAP_PORT
        found.append(_flag("--disaggregation-bootstrap-port", port, "where those that decode meet it"))
    return found


def _llama(started: Started) -> EngineCommand:
    pool, one = started.pool, started.deployment
    split, drafts = one.parallelism, one.speculation
    if started.role:
        raise BadInput(f"pool {pool.name}: llama.cpp has no disaggregated prefill and decode")
    if split.dp > 1 or split.ep > 1:
        raise BadInput(f"pool {pool.name}: llama.cpp splits a model over layers or rows, not as {split}")
    found: list[Setting] = []
    if pool.loading == "llamacpp-router":
        found += [
            _flag("--models-dir", started.weights, "several models take turns on a replica: llama.cpp's router"),
            _switch("--no-models-autoload", "the gateway says what is loaded"),
            _flag("--models-max", 0, "and what is put away"),
        ]
    else:
        found += [_flag("--model", started.weights, "the checkpoint"), *_served(started, "--alias")[:1]]
    found += _served(started, "--alias")[1:]
    found.append(_flag("--n-gpu-layers", "all", "predictions count with all layers on the GPU"))
    if split.gpus > 1:
        how = "layer" if split.pp > 1 else "row"
        found.append(_flag("--split-mode", how, f"{started.chosen}: {split}; llama.cpp's `tensor` is experimental"))
    if one.kv_format == "fp8":
        why = "kv = fp8: 8 bits an element; llama.cpp has no FP8 cache"
        found += [_flag(f"--cache-type-{part}", "q8_0", why) for part in "kv"]
        found.append(_flag("--flash-attn", "on", "a quantised V cache needs it"))
    found += [
        _flag("--parallel", _sequences(started), _why_sequences(started)),
        _switch("--kv-unified", "slots share one cache, as predictions count it"),
        _flag("--ctx-size", started.cache_tokens, "tokens of cache that fit beside the weights, for all slots"),
        _flag("--ubatch-size", int(one.stack.chunk_tokens.value), "prompt tokens a step that predictions count with"),
        _switch("--metrics", "the gateway reads load from /metrics"),
    ]
    if drafts:
        kind = {"mtp": "draft-mtp", "eagle3": "draft-eagle3", "dspark": "draft-dspark", "draft": "draft-simple",
                "ngram": "ngram-simple"}[drafts.method]  # fmt: skip
        found.append(_flag("--spec-type", kind, _why_drafts(drafts)))
        if drafts.method == "ngram":
            found.append(_flag("--spec-ngram-simple-size-m", drafts.depth, "tokens that are looked up at a time"))
        else:
            found.append(_flag("--spec-draft-n-max", drafts.depth, "tokens that are drafted at a time"))
        if started.drafter:
            found.append(_flag("--spec-draft-model", started.drafter, "weights of the drafter"))
    if pool.adapters:
        paths = ",".join(adapter.path for adapter in pool.adapters)
        found.append(_flag("--lora", paths, "the pool's adapters, as GGUF; llama.cpp loads none later"))
    return ("/app/llama-server",), found, ["the program is that of llama.cpp's own image; elsewhere it is llama-server"]


_ENGINES: dict[str, Callable[[Started], EngineCommand]] = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama}


def _served(started: Started, flag: str) -> list[Setting]:
    return [
        _flag(flag, model_name(started.pool), "the name that the gateway asks for"),
        _flag("--host", "0.0.0.0", "the gateway is on another machine; let only it in"),
        _flag("--port", started.port, "where the fleet file of `plan` looks for replicas"),
    ]


def _quantised(started: Started) -> list[Setting]:
    if not started.at_load:
        return []
    why = "no FP8 checkpoint is known of it: the engine quantises the 16-bit one while it loads it"
    return [_flag("--quantization", started.at_load, why)]


def _context(started: Started, flag: str) -> list[Setting]:
    most = started.deployment.model.max_context
    longest = min(started.pool.max_context, most or started.pool.max_context)
    if longest >= 10**8:
        return []
    why = "as far as the model reaches" if longest == most else "the longest request that a replica is to hold"
    return [_flag(flag, longest, started.published.get("context", why))]


def _sequences(started: Started) -> int:
    """Of one engine core: each of a replica's attention parts has its own."""
    deployment = started.deployment
    most = int(deployment.stack.max_sequences_on(deployment.accelerator.memory_bytes))
    return min(-(-started.pool.max_in_flight // deployment.parallelism.dp), most)


def _why_sequences(started: Started) -> str:
    if "sequences" in started.published:
        return started.published["sequences"]
    return f"max_in_flight = {started.pool.max_in_flight}: requests that a replica may have and keep its promise"


def _events(started: Started) -> dict[str, object]:
    """Where it tells what its cache holds, by the port that the fleet file has."""
    pool = started.pool
    port = pool.kv_events[0].rpartition(":")[2] if pool.kv_events[0].startswith("tcp:") else "5557"
    config: dict[str, object] = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    if started.deployment.stack.id == "sglang":
        del config["enable_kv_cache_events"]
    if pool.kv_replay:
        config["replay_endpoint"] = f"tcp://*:{pool.kv_replay[0].rpartition(':')[2]}"
    return config | ({"topic": pool.kv_topic} if pool.kv_topic else {})


def _why_drafts(drafts: Speculation) -> str:
    return f"speculation {drafts}: about {drafts.acceptance_length:.1f} tokens a step on {drafts.text} text"


def _vllm_drafts(started: Started, drafts: Speculation) -> dict[str, object]:
    method = "draft_model" if drafts.method == "draft" else drafts.method
    config: dict[str, object] = {"method": method, "num_speculative_tokens": drafts.depth}
    if drafts.method == "ngram":
        config["prompt_lookup_max"] = drafts.depth
    return config | ({"model": started.drafter} if started.drafter else {})


def _sglang_drafts(started: Started, drafts: Speculation) -> list[Setting]:
    kind = {"mtp": "NEXTN", "eagle3": "EAGLE3", "dspark": "DSPARK", "draft": "STANDALONE", "ngram": "NGRAM"}
    found = [_flag("--speculative-algorithm", kind[drafts.method], _why_drafts(drafts))]
    if drafts.method in ("mtp", "eagle3", "draft"):
        found += [
            _flag("--speculative-num-steps", drafts.depth, "passes of the drafter: one a token"),
            _flag("--speculative-eagle-topk", 1, "one draft a position, as it was measured"),
        ]
    if drafts.method == "dspark":
        found.append(_flag("--speculative-dspark-block-size", drafts.depth, "tokens that are drafted at a time"))
    else:
        found.append(_flag("--speculative-num-draft-tokens", drafts.queries, "the drafts and the token before them"))
    if started.drafter:
        found.append(_flag("--speculative-draft-model-path", started.drafter, "weights of the drafter"))
    return found


def _led(started: Started, known: set[str]) -> None:
    apart = started.pool.apart
    assert apart is not None
    if apart.connector not in known:
        named = ", ".join(sorted(known))
        raise BadInput(
            f"pool {started.pool.name}: no recipe for {apart.connector}, whose engines need a proxy; {named} do without"
        )
