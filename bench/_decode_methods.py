"""Ways to decode the same prompts: transformers' own, and our decoder with each drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec_kernels import SamplingTensors
from specdec_kernels.decoding import Drafter, SpeculativeDecoder
from specdec_kernels.demo import drafters
from specdec_kernels.demo.compare import calls_of

from ._decode_method import Method, Result, ends_of
from ._decode_peers import peers

GENERATE = "generate"
PLAIN = "ours, plain"


def make_methods(
    model, tokenizer, names: list[str] | None, parts: Path | None, num_draft: int, max_nodes: int
) -> list[Method]:
    """All methods that can run here, or those of `names` besides the two plain ones."""
    hf = _Transformers(model)
    plain = SpeculativeDecoder(model)
    methods = [Method(GENERATE, hf.run), Method(PLAIN, _ours(plain), decoder=plain)]
    methods.append(
        Method("generate, prompt lookup", lambda *a: hf.run(*a, prompt_lookup_num_tokens=num_draft), batches=False)
    )
    draft_model = drafters.draft_model(parts)
    if draft_model is not None:
        methods.append(Method("generate, assisted", lambda *a: hf.run(*a, assistant_model=draft_model), batches=False))
    for name, make in drafters.available(model, parts).items():
        drafter: Drafter = make()
        decoder = SpeculativeDecoder(
            model, drafter, num_draft=num_draft, max_nodes=max_nodes, adaptive=drafter.chooses_length,
            forward=plain.forward,
        )  # fmt: skip
        methods.append(Method(name, _ours(decoder), decoder=decoder))
        if not (drafter.trees or drafter.block_size or drafter.chooses_length):
            auto = SpeculativeDecoder(model, make(), num_draft="auto", forward=plain.forward)
            methods.append(Method(f"{name}, auto", _ours(auto), decoder=auto))
    methods += peers(model, tokenizer, num_draft, names)
    if names:
        known = [m.name for m in methods]
        if missing := [n for n in names if n not in known]:
            raise SystemExit(f"no method {', '.join(missing)}; there are: {', '.join(known)}")
        methods = [m for m in methods if m.name in (GENERATE, PLAIN, *names)]
    return methods


class _Transformers:
    """`model.generate`."""

    def __init__(self, model):
        self.model = model

    def run(self, ids, mask, temperature, tokens, seed, **options) -> Result:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with calls_of(self.model) as calls:
            output = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **sampling, **options)
        ends, rows = ends_of(self.model), []
        for row in output[:, ids.shape[1] :].tolist():
            end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
            rows.append(row[: end + 1])
        return Result(rows, len(calls))


def _ours(decoder: SpeculativeDecoder):
    def run(ids, mask, temperature, tokens, seed) -> Result:
        params = SamplingTensors.create(temperature=temperature, seed=seed, batch_size=len(ids))
        result = decoder.generate(ids, mask, params, max_new_tokens=tokens)
        return Result(result.tokens, result.stats.target_calls + 1, result.stats)

    return run
