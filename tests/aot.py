"""Compiles the Triton kernels for GPUs that are not there.

The ops run as they are, on CPU tensors, with a driver that names the wanted architecture; each launch stops after its
compilation. So what is compiled is what a GPU would be given: the same signatures, specialisations and options.

    python -m tests.aot [90 ..] [--write]     # what each kernel needs on each architecture, as JSON, or into triton_usage.json

Must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget


class _Driver:
    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # kernels are cached by device

    def get_current_stream(self, device=None):
        return 0


@contextlib.contextmanager
def compiling(arch: int):
    """Inside, launches compile for sm_`arch` and append their kernels to the list that is yielded."""
    from triton.runtime.jit import JITFunction

    compiled = []
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(arch))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        triton.runtime.driver.set_active(before)


class Usage(NamedTuple):
    registers: int
    spills: int
    """bytes of local memory"""
    shared: int
    """bytes of shared memory"""
    wide_loads: int
    """128-bit global loads in the PTX"""
    volatile_loads: int
    """loads by every thread of a word that may change meanwhile, in the PTX"""


def usage(kernel) -> Usage:
    """What a compiled kernel asks of its multiprocessor, from its binary and PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    ptx = kernel.asm["ptx"]
    wide = re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v8\.b16|ld\.global\S*\.v2\.b64", ptx)
    return Usage(
        int(found["REG"]),
        int(found["STACK"]) + int(found["LOCAL"]),
        kernel.metadata.shared,
        len(wide),
        ptx.count("ld.volatile"),
    )


ARCHITECTURES = (80, 89, 90, 100, 120)
EVERYWHERE = (
    "sample bfloat16",
    "markov_step bfloat16",
    "verify_chain bfloat16",
    "verify_chain bfloat16 V=151936",
    "verify_chain bfloat16 block",
    "verify_tree bfloat16 target_only",
    "verify_tree bfloat16 traversal",
    "build_tree",
    "kv_rollback counts",
    "kv_append_slots counts",
    "kv_evict counts",
    "kv_compact",
    "kv_copy_pages",
    "kv_scrub counts",
    "state_select",
)
"""Variants compiled for each architecture; the others for sm_90 alone, as compiling takes a second or two each."""
TABLE = Path(__file__).with_name("triton_usage.json")


def _calls() -> dict:
    """The variants of each kernel that matter, as calls of the ops: their launches are the kernels."""
    import specdec_kernels as sk
    from specdec_kernels.kv_scrub import kv_scrub

    B, K, V = 4, 3, 128_256
    params = sk.SamplingTensors.create(0.8, 0.9, seed=list(range(B)))
    cu = torch.arange(B + 1, dtype=torch.int32) * K
    drafts = torch.zeros(B * K, dtype=torch.int64)
    position = torch.zeros(B, dtype=torch.int64)
    saved = sk.Nucleus(*(torch.zeros(B * K) for _ in range(3)))

    def chain(dtype, vocab=V, **options):
        target, q = torch.zeros(B * (K + 1), vocab, dtype=dtype), torch.zeros(B * K, vocab, dtype=dtype)
        if options.pop("q", True):
            options |= {"draft_logits": q, "draft_params": params}
        sk.verify_chain(target, drafts, cu, params, position, max_draft=K, backend="triton", **options)

    def probs():
        sk.verify_chain(
            None, drafts, cu, params, position, target_probs=torch.zeros(B * (K + 1), V),
            draft_probs=torch.zeros(B * K, V), max_draft=K, backend="triton", logprobs=1,
        )  # fmt: skip

    def tree(dtype, rule, vocab=V, **options):
        target, q = torch.zeros(B * (K + 1), vocab, dtype=dtype), torch.zeros(B * K, vocab, dtype=dtype)
        if rule != "target_only":
            options |= {"draft_logits": q, "draft_params": params}
        parents = torch.zeros(B * K, dtype=torch.int64)
        sk.verify_tree(
            target, drafts, parents, cu, params, position, rule=rule, max_depth=K, backend="triton", **options
        )

    def markov(dtype, rank):
        base, w1, w2 = (torch.zeros(n, width, dtype=dtype) for n, width in ((B, V), (V, rank), (V, rank)))
        sk.markov_step(base, position, w1, w2, params, position, logits_out=base, backend="triton")

    def lossy(rule, **options):
        target, parents = torch.zeros(B * (K + 1), V, dtype=torch.bfloat16), torch.zeros(B * K, dtype=torch.int64)
        rule(target, drafts, cu, params, position, parents=parents, max_depth=K, backend="triton", **options)

    def built(candidates, nodes):
        drafted = torch.zeros(B, candidates, dtype=torch.int64)
        sk.build_tree(torch.zeros(B, candidates), drafted, drafted, nodes, backend="triton")

    def cached(op, counts, page_size=16, slots=None, **options):
        i32 = functools.partial(torch.zeros, dtype=torch.int32)
        options |= {"ref_counts": i32(64) if counts else None, "slots": slots}
        op(i32(B), i32(B), i32(B, 8), i32(64), i32(1), page_size, backend="triton", **options)

    def evicted(counts, B=64, slots=None):
        i32 = functools.partial(torch.zeros, dtype=torch.int32)
        options = {"sinks": 4, "ref_counts": i32(64) if counts else None, "slots": slots}
        sk.kv_evict(i32(B), 100, i32(B, 8), i32(64), i32(1), 16, backend="triton", **options)

    def layers(H, D, dtype, hnd=False):
        shape = (2 * B, H, 16, D) if hnd else (2 * B, 16, H, D)
        return [t.transpose(1, 2) if hnd else t for t in (torch.zeros(shape, dtype=dtype) for _ in range(4))]

    def compacted(H, D, dtype, K=8, hnd=False, paged=True):
        caches = layers(H, D, dtype, hnd)
        table = torch.zeros(B, 2, dtype=torch.int32) if paged else None
        path, lengths = torch.zeros(B, K, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
        sk.kv_compact(caches, path, lengths, block_table=table, backend="triton")

    def copied(caches, dtype=torch.int32):
        sk.kv_copy_pages(caches, torch.zeros(B, dtype=dtype), torch.zeros(B, dtype=dtype), backend="triton")

    def scrubbed(caches, counts=True, tails=True, slots=None):
        i32 = functools.partial(torch.zeros, dtype=torch.int32)
        held = (i32(B), i32(B), i32(B, 8), i32(2 * B) if counts else None, slots) if tails else ()
        kv_scrub(caches, i32(2 * B), i32(1), i32(1), *held, backend="triton")

    def selected(**options):
        states, accepted = [torch.zeros(B, K, 32, 64, 64) for _ in range(4)], torch.zeros(B, dtype=torch.int32)
        sk.state_select(states, accepted, backend="triton", **options)

    bf16, f32 = torch.bfloat16, torch.float32
    call = functools.partial
    return {
        "sample bfloat16": call(
            sk.sample, torch.zeros(B, V, dtype=bf16), params, position, logprobs=1, backend="triton"
        ),
        "sample bfloat16 several": call(
            sk.sample, torch.zeros(B, V, dtype=bf16), params, position, logprobs=1, num_samples=8, backend="triton"
        ),
        "markov_step bfloat16": call(markov, bf16, 256),
        "markov_step float32": call(markov, f32, 64),
        "markov_step float16 odd rank": call(markov, torch.float16, 100),
        "filter_probs float32": call(sk.filter_probs, torch.zeros(B, V), params, backend="triton"),
        "verify_chain bfloat16": call(chain, bf16, logprobs=1, return_nucleus=True),
        "verify_chain float32": call(chain, f32),
        "verify_chain bfloat16 V=151936": call(chain, bf16, 151_936),
        "verify_chain bfloat16 unaligned": call(chain, bf16, 32_001),
        "verify_chain bfloat16 saved nucleus": call(chain, bf16, draft_nucleus=saved),
        "verify_chain float16 without q": call(chain, torch.float16, q=False),
        "verify_chain bfloat16 coupled": call(chain, bf16, q=False, rule="coupled"),
        "verify_chain bfloat16 block": call(chain, bf16, rule="block"),
        "verify_chain float32 block saved nucleus": call(chain, f32, rule="block", draft_nucleus=saved),
        "verify_chain bfloat16 V=1": call(chain, bf16, 1),
        "verify_chain probs": probs,
        "verify_tree bfloat16 target_only": call(tree, bf16, "target_only", logprobs=1, return_nucleus=True),
        "verify_tree bfloat16 recursive": call(tree, bf16, "recursive", replacement=True),
        "verify_tree bfloat16 traversal": call(tree, bf16, "traversal", replacement=False),
        "verify_tree float32 traversal": call(tree, f32, "traversal", replacement=False),
        "verify_tree float32 traversal saved nucleus": call(
            tree, f32, "traversal", replacement=False, draft_nucleus=saved
        ),
        "verify_tree bfloat16 greedy_draft": call(tree, bf16, "greedy_draft"),
        "verify_tree bfloat16 traversal unaligned": call(tree, bf16, "traversal", 32_001, replacement=False),
        "verify_tree bfloat16 typical": call(lossy, sk.lossy.typical),
        "verify_tree bfloat16 threshold": call(lossy, sk.lossy.threshold, threshold_acc=0.7),
        "verify_tree bfloat16 synthetic": call(lossy, sk.lossy.synthetic, rates=torch.ones(3), logprobs=1),
        "schedule_lengths 256": call(
            sk.schedule_lengths, torch.zeros(32, 8), steps_per_second=torch.zeros(400), backend="triton"
        ),
        "schedule_lengths 4096": call(sk.schedule_lengths, torch.zeros(512, 8), budget=99, backend="triton"),
        "build_tree": call(built, 810, 60),
        "build_tree C=4096": call(built, 4096, 128),
        "kv_rollback": call(cached, sk.kv_rollback, False),
        "kv_rollback counts": call(cached, sk.kv_rollback, True),
        "kv_rollback window": call(cached, sk.kv_rollback, False, window=100, sinks=4),
        "kv_rollback counts window": call(cached, sk.kv_rollback, True, window=100, sinks=4),
        "kv_rollback counts window slots": call(cached, sk.kv_rollback, True, slots=position, window=100, sinks=4),
        "kv_append_slots": call(cached, sk.kv_append_slots, False, max_new=17),
        "kv_append_slots counts": call(cached, sk.kv_append_slots, True, max_new=17),
        "kv_append_slots counts long": call(cached, sk.kv_append_slots, True, page_size=1, max_new=4096),
        "kv_append_slots counts slots": call(cached, sk.kv_append_slots, True, slots=position, max_new=17),
        "kv_evict": call(evicted, False),
        "kv_evict counts": call(evicted, True),
        "kv_evict counts slots": call(evicted, True, slots=torch.arange(64, dtype=torch.int32)),
        "kv_evict counts B=8": call(evicted, True, 8),
        "kv_evict counts B=1": call(evicted, True, 1),
        "kv_compact": call(compacted, 8, 128, bf16),
        "kv_compact HND": call(compacted, 8, 128, bf16, hnd=True),
        "kv_compact latents K=128": call(compacted, 1, 576, bf16, K=128),
        "kv_compact contiguous, odd heads": call(compacted, 3, 7, torch.int8, hnd=True, paged=False),
        "kv_copy_pages": call(copied, layers(8, 128, bf16)),
        "kv_copy_pages tokens outside, int64": call(
            copied, [t.transpose(0, 1) for t in layers(8, 128, bf16)], torch.int64
        ),
        "kv_copy_pages odd heads": call(copied, [t[..., 1:] for t in layers(3, 8, torch.int8)]),
        "kv_scrub pages": call(scrubbed, layers(8, 128, bf16), tails=False),
        "kv_scrub": call(scrubbed, layers(8, 128, bf16), counts=False),
        "kv_scrub counts": call(scrubbed, layers(8, 128, bf16)),
        "kv_scrub counts slots": call(scrubbed, layers(8, 128, bf16), slots=position),
        "kv_scrub HND": call(scrubbed, layers(8, 128, bf16, hnd=True)),
        "kv_scrub odd heads": call(scrubbed, [t[..., 1:] for t in layers(3, 8, torch.int8)]),
        "state_select": selected,
        "state_select out": call(selected, out=[torch.zeros(B, 32, 64, 64)] * 4, indices=position),
    }


def measure(arch: int) -> dict[str, Usage]:
    from specdec_kernels import _backends

    _backends._find_triton = lambda device_type: None  # nothing runs: the driver stops each launch
    found = {}
    for name, call in _calls().items():
        if arch != 90 and name not in EVERYWHERE:
            continue
        with compiling(arch) as compiled:
            call()
        for kernel in compiled:
            found[f"{kernel.name}, {name}"] = usage(kernel)
    return found


def main(argv: list[str]) -> None:
    if triton.knobs.runtime.interpret:
        sys.exit("tests.aot: TRITON_INTERPRET must not be set, nothing is compiled in the interpreter")
    chosen = [int(a) for a in argv if a.isdigit()] or ARCHITECTURES
    found = {f"sm_{arch}": {k: u._asdict() for k, u in measure(arch).items()} for arch in chosen}
    known = json.loads(TABLE.read_text()) if "--write" in argv and len(chosen) < len(ARCHITECTURES) else {}
    text = json.dumps({**known, "triton": triton.__version__, **found}, indent=1)
    if "--write" in argv:
        TABLE.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
