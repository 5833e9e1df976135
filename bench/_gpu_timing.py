"""Times of `verify_chain` on a GPU: cells, peers, and the clock (CUDA events around CUDA-graph replays)."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import specdec_kernels as sk

from ._gpu_checks import to

TEMPERATURE, TOP_P = 0.8, 0.9
DRAFT_NOISE = 0.5


@dataclass(frozen=True)
class Cell:
    batch: int
    vocab: int
    dtype: str = "bfloat16"
    drafts: int = 4
    q: bool = True
    top_p: bool = True
    rows: str = "model-like"
    peers: bool = False

    @property
    def name(self) -> str:
        parts = [f"B={self.batch} d={self.drafts} V={self.vocab} {self.dtype} {self.rows}"]
        parts += ["" if self.q else "no q", "" if self.top_p else "no top-p"]
        return " ".join(part for part in parts if part)


BATCHES, VOCABS = (1, 4, 8, 32, 128, 256), (32_000, 128_256, 151_936)


def cells(full: bool) -> list[Cell]:
    """The grid, or the line of bfloat16 with q and top-p and single steps away from it."""
    if full:
        grid = itertools.product(BATCHES, VOCABS, ("bfloat16", "float32"), (4, 7), (True, False), (True, False))
        return [Cell(b, v, t, d, q, p, peers=d == 4 and q and p) for b, v, t, d, q, p in grid]
    line = [Cell(b, v, peers=v == 128_256 or b in (1, 32)) for b in BATCHES for v in VOCABS]
    steps = [{"dtype": "float32"}, {"drafts": 7}, {"q": False}, {"top_p": False}, {"rows": "flat"}, {"rows": "normal"}]
    return line + [Cell(b, 128_256, **step) for step in steps for b in (1, 8, 32, 128)]


def tiny_cells() -> list[Cell]:
    """For the interpreter."""
    return [Cell(2, 1000, drafts=2, peers=True), Cell(1, 300, "float32", 1, q=False, top_p=False)]


class Case:
    """A cell's tensors and its call, outputs reused. Drafts are drawn from q: logits like the target's with noise."""

    def __init__(self, cell: Cell, device: torch.device, backend: str):
        self.cell, self.device = cell, device
        B, d, V = cell.batch, cell.drafts, cell.vocab
        g = torch.Generator(device).manual_seed(7)
        rows = torch.randn(B * (d + 1), V, generator=g, device=device)
        if cell.rows == "model-like":  # as SmolLM2's: deviation 3.4, a few tokens 10 to 19 above the mean
            head = torch.randint(V, (B * (d + 1), 8), generator=g, device=device)
            rows = (3.2 * rows).scatter_(1, head, 10 + 9 * torch.rand(head.shape, generator=g, device=device))
        elif cell.rows == "normal":
            rows *= 3
        elif cell.rows != "flat":
            raise ValueError(cell.rows)
        dtype = getattr(torch, cell.dtype)
        drafted = rows.view(B, d + 1, V)[:, :d].flatten(0, 1)
        draft = torch.randn(B * d, V, generator=g, device=device).mul_(DRAFT_NOISE).add_(drafted).to(dtype)
        self.target, self.draft = rows.to(dtype), draft
        top_p = TOP_P if cell.top_p else 1.0
        self.params = to(sk.SamplingTensors.create(TEMPERATURE, top_p, seed=list(range(B))), device)
        self.position = torch.full((B,), 100, device=device)
        request = torch.arange(B, device=device).repeat_interleave(d)
        offset = torch.arange(d, device=device).repeat(B)
        self.cu = torch.arange(B + 1, dtype=torch.int32, device=device) * d
        self.tokens = sk.sample(
            draft, self.params, self.position[request], rows=request, stream=0, ids=offset, backend=backend
        ).tokens
        self.options = {"max_draft": d, "backend": backend}
        if cell.q:
            self.options |= {"draft_logits": draft, "draft_params": self.params}
        self.out = self.call(None)

    def call(self, out) -> sk.VerifyOutput:
        return sk.verify_chain(self.target, self.tokens, self.cu, self.params, self.position, out=out, **self.options)

    def __call__(self) -> Tensor:
        return self.call(self.out).tokens

    @property
    def floor_bytes(self) -> int:
        """Each row that decides the output once, and one row pair again for the token that is drawn."""
        accepted = self.out.num_accepted.long()
        target_rows = int((accepted + 1).sum())
        draft_rows = int(accepted.clamp_max(self.cell.drafts - 1).add(1).sum()) if self.cell.q else 0
        return (target_rows + draft_rows) * self.target[0].numel() * self.target.element_size()

    @property
    def all_bytes(self) -> int:
        return (self.target.numel() + (self.draft.numel() if self.cell.q else 0)) * self.target.element_size()


class Clock:
    """Medians in microseconds. On a CPU (the rehearsal) wall time of a few calls, which mean nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device=device)

    def graph(self, run: Callable) -> Callable:
        """The call as a CUDA graph where it can be captured, else itself."""
        if not self.cuda:
            return run
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def us(self, run: Callable, cold: bool, rounds: int = 30) -> float:
        if not self.cuda:
            return self.host_us(run, 2)
        for _ in range(3):
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        torch.cuda.synchronize()
        for start, end in events:
            if cold:
                self.flush.zero_()
            else:
                torch.cuda._sleep(2_000_000)  # a millisecond, longer than the host takes to queue the call
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)

    def host_us(self, run: Callable, rounds: int = 100) -> float:
        """What a call costs its caller, launches queued and not waited for."""
        run()
        samples = []
        for _ in range(rounds):
            if self.cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            samples.append(1e6 * (time.perf_counter() - start))
        return statistics.median(samples)

    def read_bytes_per_us(self) -> float:
        """Read bandwidth: twice a copy's bytes per its time. 512 MiB, or 1 MiB in the rehearsal."""
        size = (1 << 29) if self.cuda else (1 << 20)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.us(lambda: target.copy_(source), cold=False)


def kernels_of(run: Callable, device: torch.device) -> list[str] | None:
    """Names of the kernels that one call launches, by the profiler."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]


# --- peers ----------------------------------------------------------------------------------------------------------------


def sorted_torch(case: Case) -> Callable:
    """`_peers.sorted_torch` without indexing by masks and without multinomial, which wait for the device and so cannot be
    captured in a graph; that one stays as it was measured on CPUs."""
    from ._peers import sort_filtered

    B, d, device = case.cell.batch, case.cell.drafts, case.device
    request = torch.arange(B, device=device)
    drafts = case.tokens.long().view(B, d)
    temperature, top_p = case.params.temperature[:1, None], case.params.top_p[:1, None]

    def run() -> Tensor:
        p = sort_filtered(case.target, temperature, top_p).view(B, d + 1, -1)
        q = sort_filtered(case.draft, temperature, top_p).view(B, d, -1)
        p_x = p[:, :d].gather(2, drafts[:, :, None])[:, :, 0]
        q_x = q.gather(2, drafts[:, :, None])[:, :, 0]
        accepted = (torch.rand(B, d, device=device) * q_x < p_x).long().cumprod(1).sum(1)
        q = torch.cat([q, torch.zeros_like(q[:, :1])], 1)  # the bonus row subtracts nothing
        weights = (p[request, accepted] - q[request, accepted]).clamp_min_(0)
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, p[request, accepted])
        noise = torch.empty_like(weights).exponential_()
        last = (weights / noise).argmax(1)
        tokens = torch.cat([drafts, drafts.new_full((B, 1), -1)], 1)
        place = torch.arange(d + 1, device=device)
        return torch.where(
            place == accepted[:, None], last[:, None], torch.where(place < accepted[:, None], tokens, -1)
        )

    return run


def flashinfer(case: Case) -> Callable:
    """softmax, top-p renormalisation of p and q, chain speculative sampling."""
    from flashinfer.sampling import chain_speculative_sampling, softmax, top_p_renorm_probs

    B, d, V = case.cell.batch, case.cell.drafts, case.cell.vocab
    drafts = case.tokens.int().view(B, d)
    counts = torch.zeros(2, B, dtype=torch.int32, device=case.device)

    def probs(logits: Tensor) -> Tensor:
        p = softmax(logits.float(), temperature=TEMPERATURE)
        return top_p_renorm_probs(p, TOP_P) if case.cell.top_p else p

    def run() -> Tensor:
        q, p = probs(case.draft).view(B, d, V), probs(case.target).view(B, d + 1, V)
        return chain_speculative_sampling(q, drafts, p, counts[0], counts[1])[0]

    return run


def vllm(case: Case) -> Callable:
    """The V2 path: a float32 copy, temperature, Triton top-k/top-p, rejection_sample (whose q has the temperature only)."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    B, d, V, device = case.cell.batch, case.cell.drafts, case.cell.vocab, case.device
    rows = B * (d + 1)
    request = torch.arange(B, dtype=torch.int32, device=device)
    expanded = request.repeat_interleave(d + 1)
    local = torch.arange(d + 1, dtype=torch.int32, device=device).repeat(B)
    drafts = torch.zeros(B, d + 1, dtype=torch.int32, device=device)
    drafts[:, 1:] = case.tokens.view(B, d)
    top_p = case.params.top_p[expanded.long()]
    arguments = (
        case.draft.view(B, d, V), drafts.flatten(), torch.arange(B + 1, dtype=torch.int32, device=device) * (d + 1),
        100 + local.long(), request, expanded, local, case.params.temperature, case.params.seed, d,
    )  # fmt: skip

    def run() -> Tensor:
        logits = torch.empty(rows, V, dtype=torch.float32, device=device).copy_(case.target).div_(TEMPERATURE)
        if case.cell.top_p:
            logits = apply_top_k_top_p_triton(logits, None, top_p)
        return rejection_sample(logits, *arguments)[0]

    return run


PEERS = {"PyTorch, sort": sorted_torch, "FlashInfer": flashinfer, "vLLM V2": vllm}


def measure(cell: Cell, device: torch.device, backend: str, clock: Clock, bandwidth: float, missing: dict) -> dict:
    """One cell: our call in a graph, warm and cold, its host cost, its share of the floor; peers in the same graph form."""
    case = Case(cell, device, backend)
    replay = clock.graph(case)
    warm, cold = clock.us(replay, cold=False), clock.us(replay, cold=True)
    floor = case.floor_bytes / bandwidth
    result = {
        "cell": cell.name, **cell.__dict__, "mean_accepted": float(case.out.num_accepted.double().mean()),
        "warm_us": warm, "cold_us": cold, "host_us": clock.host_us(case, 50 if clock.cuda else 1),
        "floor_us": floor, "cold_of_floor": cold / floor, "all_rows_us": case.all_bytes / bandwidth, "peers": {},
    }  # fmt: skip
    for name, make in PEERS.items() if cell.peers and cell.q else ():
        if name in missing:
            continue
        try:
            run = make(case)
            run()
        except ImportError as error:
            missing[name] = f"not importable: {error}"
            continue
        except Exception as error:  # a peer that cannot run this must not end the measurement
            result["peers"][name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        try:
            run, form = clock.graph(run), "graph"
        except Exception:
            torch.cuda.synchronize()
            form = "eager"
        us = clock.us(run, cold=True, rounds=10)
        result["peers"][name] = {"cold_us": us, "form": form, "slower": us / cold}
    return result
