"""Other packages as methods of the decoding bench, where they are installed: vLLM on the CPU, and `flashspec` of PyPI."""

from __future__ import annotations

import atexit
import importlib.util
import os
import tempfile

import torch

from specdec_kernels.demo.compare import calls_of

from ._decode_method import Method, Result, ends_of

VLLM, VLLM_LOOKUP = "vLLM", "vLLM, ngram"
FLASHSPEC_LOOKUP = "PyPI flashspec, lookup"


def peers(model, tokenizer, num_draft: int, names: list[str] | None = None) -> list[Method]:
    """Those of `names` (None: all) whose package is installed. They run on the CPU alone."""
    methods: list[Method] = []
    wanted = {name for name in (VLLM, VLLM_LOOKUP, FLASHSPEC_LOOKUP) if names is None or name in names}
    if model.device.type != "cpu":
        return methods
    if FLASHSPEC_LOOKUP in wanted and importlib.util.find_spec("flashspec") is not None:
        methods.append(Method(FLASHSPEC_LOOKUP, _FlashSpec(model, num_draft).run, batches=False))
    if wanted & {VLLM, VLLM_LOOKUP} and importlib.util.find_spec("vllm") is not None:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        model.save_pretrained(folder.name)
        tokenizer.save_pretrained(folder.name)
        dtype, ends = str(model.dtype).removeprefix("torch."), ends_of(model)
        for name, drafts in ((VLLM, 0), (VLLM_LOOKUP, num_draft)):
            if name in wanted:
                methods.append(Method(name, _Vllm(folder.name, dtype, ends, drafts).run))
    return methods


class _FlashSpec:
    """Its engine with its lookup drafter; the target runs eagerly, as it does wherever there is no CUDA."""

    def __init__(self, model, num_draft: int):
        self.model, self.num_draft = model, num_draft
        self.engines: dict[float, object] = {}

    def _engine(self, temperature: float):
        import flashspec
        from flashspec.engine import NgramDrafter, TargetModel

        if temperature not in self.engines:
            config = flashspec.FlashSpecConfig(
                device="cpu", drafter_strategy="bandit", bandit=flashspec.BanditConfig(n_arms=1), compile=False,
                sampling=flashspec.SamplingConfig(temperature=temperature, gamma=self.num_draft),
                eos_token_ids=tuple(sorted(ends_of(self.model))),
            )  # fmt: skip
            target = TargetModel("target", torch.device("cpu"), self.model.dtype, model=self.model)
            self.engines[temperature] = flashspec.SpeculativeEngine(config, [NgramDrafter()], target)
        return self.engines[temperature]

    def run(self, ids, mask, temperature, tokens, seed) -> Result:
        engine = self._engine(temperature)
        torch.manual_seed(seed)
        with calls_of(self.model) as calls:
            output = engine.generate(ids, max_new_tokens=tokens)
        return Result([output.output_ids[0, : output.n_tokens_generated].tolist()], len(calls))


class _Vllm:
    """An engine in a process of its own. Its target forwards are counted by what it says it has accepted."""

    def __init__(self, folder: str, dtype: str, ends: set[int], num_draft: int = 0):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Bound threads would not leave their cores to the other methods.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM

        options: dict = {"model": folder, "dtype": dtype, "max_model_len": 1024, "disable_log_stats": False}
        if num_draft:
            options["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": num_draft, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
            }  # fmt: skip
        self.engine, self.ends = LLM(**options), sorted(ends)

    def _accepted(self) -> int:
        found = [m.value for m in self.engine.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
        return int(sum(found))

    def run(self, ids, mask, temperature, tokens, seed) -> Result:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": row[kept.bool()].tolist()} for row, kept in zip(ids, mask, strict=True)]
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=tokens, seed=seed + row if temperature else None,
                stop_token_ids=self.ends, detokenize=False,
            )
            for row in range(len(prompts))
        ]  # fmt: skip
        before = self._accepted()
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        rows = [list(output.outputs[0].token_ids) for output in outputs]
        accepted = self._accepted() - before
        return Result(rows, round((sum(map(len, rows)) - accepted) / len(rows)))
