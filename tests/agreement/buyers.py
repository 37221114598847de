"""Forty questions of buyers, as rows: what a model, a load, targets, prices and accelerators are asked about."""

from typing import NamedTuple


class Buyer(NamedTuple):
    model: str
    precision: str
    input: int
    output: int
    on: str
    # Of the whole service, for `plan` and `simulate`.
    requests_per_s: float
    # Means for `scorecard`, percentiles for `plan`; 0: none.
    ttft_ms: float
    tpot_ms: float
    prices: str = "on-demand"
    in_flight: int = 64

    @property
    def name(self) -> str:
        return f"{self.model}-{self.precision}-{self.input}x{self.output}-{self.prices}-{self.on.replace(',', '+')}"

    @property
    def workload(self) -> str:
        accelerators = ", ".join(f'"{name}"' for name in self.on.split(","))
        targets = f"ttft_ms = {{ p95 = {self.ttft_ms:g} }}\n" if self.ttft_ms else ""
        targets += f"tpot_ms = {{ p90 = {self.tpot_ms:g} }}\n" if self.tpot_ms else ""
        return (
            f'name = "asked"\n[traffic]\nrequests_per_s = {self.requests_per_s}\nmean_over_peak = 0.5\n'
            f'[[class]]\nname = "all"\nmodel = "{self.model}"\nshare = 1\ninput = {self.input}\noutput = {self.output}\n'
            f'{targets}[models."{self.model}"]\nprecisions = ["{self.precision}"]\n'
            f'[prices]\nkind = "{self.prices}"\n[constraints]\naccelerators = [{accelerators}]\nwhole_nodes = false\n'
        )


BUYERS = [
    # The sizes that everybody asks about, rented.
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi300x,h200", 10.0, 2000, 50),
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi355x,b200", 20.0, 2000, 50),
    Buyer("llama-3.3-70b", "fp8", 4096, 1024, "mi355x,b200", 20.0, 3000, 60),
    Buyer("llama-3.3-70b", "fp8", 500, 1500, "mi300x,h100-sxm", 5.0, 1000, 60),
    Buyer("llama-3.3-70b", "fp8", 16000, 500, "mi300x,h200", 2.0, 8000, 80),
    Buyer("llama-3.3-70b", "bf16", 2048, 512, "mi300x,h200", 5.0, 3000, 80),
    Buyer("llama-3.1-8b", "bf16", 1024, 256, "mi300x,h100-sxm", 30.0, 1000, 40),
    Buyer("llama-3.1-8b", "fp8", 1024, 256, "mi300x,h200", 60.0, 1000, 40),
    Buyer("llama-3.1-8b", "bf16", 4096, 200, "h100-sxm,h200", 20.0, 2000, 40),
    Buyer("qwen3-32b", "bf16", 2048, 512, "mi300x,h200", 8.0, 2000, 60),
    Buyer("qwen3-32b", "fp8", 2048, 1024, "mi355x,b200", 15.0, 2000, 60),
    Buyer("qwen3-8b", "bf16", 1024, 256, "mi300x,h200", 25.0, 1000, 50),
    Buyer("gemma-3-27b", "bf16", 1024, 512, "mi300x,h200", 8.0, 2000, 60),
    Buyer("llama-3.1-405b", "fp8", 2048, 512, "mi300x,h200", 3.0, 4000, 100),
    Buyer("llama-3.1-405b", "fp8", 2048, 512, "mi355x,b200", 3.0, 4000, 100),
    # Mixtures of experts.
    Buyer("gpt-oss-120b", "native", 2048, 512, "mi300x,h200", 20.0, 2000, 40),
    Buyer("gpt-oss-120b", "native", 2048, 1024, "mi355x,b200", 40.0, 0, 40),
    Buyer("gpt-oss-20b", "native", 1024, 256, "mi300x,h100-sxm", 40.0, 1000, 30),
    Buyer("qwen3-30b-a3b", "fp8", 2048, 512, "mi300x,h200", 20.0, 2000, 50),
    Buyer("mixtral-8x7b", "bf16", 1024, 256, "mi300x,h200", 15.0, 2000, 60),
    Buyer("qwen3-235b-a22b", "fp8", 2048, 512, "mi300x,h200", 5.0, 3000, 60),
    Buyer("deepseek-r1", "native", 2048, 1024, "mi355x,b200", 10.0, 4000, 60),
    Buyer("deepseek-v3", "native", 4096, 512, "mi300x,h200", 3.0, 5000, 80),
    # Bought.
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi325x,b200", 20.0, 2000, 50, "buy"),
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi355x,b200", 20.0, 2000, 50, "buy"),
    Buyer("llama-3.3-70b", "fp8", 4096, 1024, "mi325x,h200", 10.0, 3000, 60, "buy"),
    Buyer("llama-3.1-8b", "bf16", 1024, 256, "mi300x,h100-sxm", 30.0, 1000, 40, "buy"),
    Buyer("llama-3.1-405b", "fp8", 2048, 512, "mi325x,h200", 3.0, 4000, 100, "buy"),
    Buyer("gpt-oss-120b", "native", 2048, 512, "mi325x,b200", 20.0, 2000, 40, "buy"),
    Buyer("deepseek-r1", "native", 2048, 1024, "mi355x,b200", 10.0, 4000, 60, "buy"),
    Buyer("qwen3-32b", "fp8", 2048, 512, "mi300x,h200", 8.0, 2000, 60, "buy"),
    # At home and in small offices.
    Buyer("qwen3-8b", "bf16", 1024, 256, "rx-7900-xtx,rtx-4090", 1.0, 1000, 50, "buy", in_flight=16),
    Buyer("qwen3-8b", "bf16", 1024, 256, "rtx-5090,rtx-3090", 2.0, 1000, 50, "buy", in_flight=16),
    Buyer("llama-3.1-8b", "bf16", 1024, 256, "l40s,rtx-pro-6000", 2.0, 1500, 60, "buy", in_flight=16),
    # Little traffic, long prompts, nobody who waits, other kinds of prices.
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi300x,h200", 0.2, 2000, 50),
    Buyer("llama-3.3-70b", "fp8", 60000, 500, "mi355x,b200", 0.5, 40000, 100),
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi300x,h200", 20.0, 0, 0),
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "mi325x,mi350x", 10.0, 2000, 50, "quoted"),
    Buyer("llama-3.3-70b", "fp8", 2048, 512, "b200,h200", 10.0, 2000, 50, "spot"),
    Buyer("llama-3.1-8b", "fp8", 512, 64, "mi300x,h200", 200.0, 500, 40),
]
