"""What the op tests share: rows of several shapes, random verification calls, and the comparison with the oracle.

A backend computes in float32, the oracle in float64; the oracle says by its `margin` how far each decision is from falling
the other way. Where the numbers 1e-5 and 2e-6 below come from, with x = (z - row_max) / T:

- exp(x) has a relative error of 2e-7 (the polynomial) + 2.4e-7 |x| (three roundings before it); tokens that decide
  anything have |x| < 20;
- a mass is summed in float32 over at most 4,096 / 32 terms a lane, in double after that: relative error 2e-6 in practice,
  8e-6 at worst;
- a race score is a sum of logarithms of size < 25: absolute error 3e-6 at most.

So a decision whose margin is below 1e-5 is undecided in float32; all others must agree exactly.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

import python_ref
import specdec_kernels as sk

UNDECIDED = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = ("hf", "vllm", "joint")
KINDS = ("normal", "flat", "peaked", "tied", "lm", "masked", "hostile")
SMALL_VOCABS = (2, 17, 111, 1000, 4096, 4097)

# One request each: (temperature, top_p, top_k, min_p).
FILTERS = (
    (0.8, 0.9, 0, 0.0),
    (1.0, 1.0, 0, 0.0),
    (0.0, 0.9, 5, 0.1),
    (1.3, 1.0, 5, 0.0),
    (0.5, 0.95, 0, 0.2),
    (0.7, 0.3, 3, 0.05),
    (1.0, 0.6, 40, 0.01),
    (1.0, 1.0, 0, 0.1),
    (1e-3, 0.9, 0, 0.0),
    (50.0, 0.5, 0, 0.0),
    (2.0, 0.0, 0, 0.0),
    (0.9, 0.99, 1000, 0.0),
)


def ids(values) -> list[str]:
    """Readable parametrize ids."""
    return [str(v).removeprefix("torch.") for v in values]


def generator(*key) -> torch.Generator:
    seed = 0
    for part in key:
        for byte in str(part).encode():
            seed = (seed * 257 + byte) % (2**61 - 1)
    return torch.Generator().manual_seed(seed)


def make_rows(kind: str, n: int, vocab: int, dtype=torch.float32, seed=0) -> Tensor:
    """[n, vocab] logits. "lm" is shaped like a language model's: deviation 3.4, a few tokens 10-19 above the mean."""
    g = generator(kind, n, vocab, seed)
    z = torch.randn(n, vocab, generator=g)
    if kind == "normal":
        z = z * 3
    elif kind == "peaked":
        z = z * 12
    elif kind == "tied":
        z = torch.randint(-3, 4, (n, vocab), generator=g).float()
    elif kind == "lm":
        head = torch.randint(vocab, (n, min(8, vocab)), generator=g)
        z = (z * 3.2).scatter(1, head, 10 + 9 * torch.rand(head.shape, generator=g))
    elif kind == "masked":
        z = torch.where(torch.rand(n, vocab, generator=g) < 0.1, z * 3, -torch.inf)
        z[:, vocab // 2] = 0.0  # a grammar leaves something
    elif kind == "hostile":
        place = torch.rand(n, vocab, generator=g)
        z = torch.where(place < 0.02, torch.nan, torch.where(place > 0.97, -torch.inf, z * 3))
        z[torch.rand(n, generator=g) < 0.15] = -torch.inf
        infinite = torch.rand(n, generator=g) < 0.15
        z[infinite] = torch.where(torch.rand(vocab, generator=g) < 0.3, torch.inf, z[infinite])
    elif kind != "flat":
        raise ValueError(kind)
    return z.to(dtype)


def make_params(filters=FILTERS, seed=0, **overrides) -> sk.SamplingTensors:
    t, p, k, m = zip(*filters, strict=True)
    params = sk.SamplingTensors.create(
        list(t), list(p), list(k), list(m), seed=[seed * 1000003 + 17 * b - 5 for b in range(len(t))]
    )
    return replace(params, **overrides)


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of one `verify_chain` call, which the oracle takes as well."""

    target: Tensor
    drafts: Tensor
    cu: Tensor
    params: sk.SamplingTensors
    position: Tensor | None
    options: dict = field(default_factory=dict)

    def run(self, backend: str, **extra) -> sk.VerifyOutput:
        extra = {"logprobs": 1, "return_nucleus": True, **extra}
        options = {**self.options, **extra}
        target = None if "target_probs" in options else self.target
        return sk.verify_chain(target, self.drafts, self.cu, self.params, self.position, backend=backend, **options)

    def oracle(self) -> python_ref.VerifyResult:
        target = None if "target_probs" in self.options else self.target
        return python_ref.verify_chain(target, self.drafts, self.cu, self.params, self.position, **self.options)

    def but(self, **changes) -> "Call":
        """The same call with other tensors or options (an option of None is removed)."""
        fields = {k: changes.pop(k) for k in tuple(changes) if k in ("target", "drafts", "cu", "params", "position")}
        options = {k: v for k, v in {**self.options, **changes}.items() if v is not None}
        return replace(self, options=options, **fields)

    @property
    def lengths(self) -> list[int]:
        return (self.cu[1:] - self.cu[:-1]).tolist()

    @property
    def requests(self) -> Tensor:
        """[D], the request of each draft."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def offsets(lengths) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


Q_SOURCES = ("logits", "nucleus", "probs", "none")


def make_call(
    kind="normal",
    vocab=1000,
    dtype=torch.float32,
    q="logits",
    lengths=None,
    filters=FILTERS,
    seed=0,
    order="hf",
    rule="token",
) -> Call:
    """Requests of mixed lengths whose drafts were really sampled from q, a noisy copy of the target."""
    B = len(filters)
    g = generator("call", kind, vocab, seed)
    if lengths is None:
        lengths = torch.randint(0, 4, (B,), generator=g).tolist()
    cu, params = offsets(lengths), make_params(filters, seed)
    D = int(cu[-1])
    target = make_rows(kind, D + B, vocab, dtype, seed)
    position = torch.randint(0, 2**40, (B,), generator=g)
    call = Call(target, torch.zeros(D, dtype=torch.int64), cu, params, position, {"rule": rule, "filter_order": order})
    request = call.requests
    offset = torch.arange(D) - cu[:-1].long()[request]
    rows = torch.arange(D) + request
    noise = 0.7 * torch.randn(D, vocab, generator=g)
    logits = (target[rows].float() + noise).to(dtype)
    drawn = python_ref.sample(logits, params, position[request], rows=request, stream=0, ids=offset, filter_order=order)
    call = call.but(drafts=drawn.tokens.long())
    if q == "none":
        return call
    if q == "probs":
        probs = python_ref.filter_probs(logits, params, rows=request, filter_order=order)
        return call.but(draft_probs=probs.float())
    saved = sk.Nucleus(*(f.float() for f in drawn.nucleus)) if q == "nucleus" else None
    return call.but(draft_logits=logits, draft_params=params, draft_nucleus=saved)


@lru_cache(maxsize=256)
def known_call(**key) -> tuple[Call, python_ref.VerifyResult]:
    """A call and the oracle's answer, made once for all backends."""
    call = make_call(**key)
    return call, call.oracle()


@dataclass
class Tally:
    """How many results were compared, how many of them float32 cannot decide, and how many of those came out otherwise."""

    total: int = 0
    undecided: int = 0
    differ: int = 0

    def assert_few(self, undecided: float = 0.03, differ: float = 0.005) -> None:
        """Most undecided rows are those of T = 50: half of 1,000 near-equal tokens lies within 1e-5 of a boundary often."""
        assert self.total > 0
        assert self.undecided <= max(1, undecided * self.total), f"{self.undecided} of {self.total} are undecided"
        assert self.differ <= max(1, differ * self.total), f"{self.differ} of {self.total} differ"


def close(got: Tensor, want: Tensor) -> Tensor:
    """Log-probabilities and log-masses: equal infinities, else within float32 rounding (see the module's docstring)."""
    want = want.double()
    finite = want.isfinite()
    error = torch.where(finite, got.double() - want, 0.0).abs()
    bound = 2e-6 + 2.4e-7 * (torch.where(finite, want, 0.0).abs() + 12)
    return torch.where(finite, error <= bound, got.double() == want)


def compare(out, ref, tally: Tally) -> None:
    """A backend's `VerifyOutput` or `SampleOutput` with the oracle's result, request by request."""
    names = [n for n in ("tokens", "num_accepted", "path", "num_emitted", "status") if hasattr(ref, n)]
    for b in range(ref.tokens.shape[0]):
        problems = [n for n in names if not torch.equal(getattr(out, n)[b], getattr(ref, n)[b])]
        if out.nucleus is not None:
            for n in ("cutoff", "row_max"):
                if not torch.equal(getattr(out.nucleus, n)[b], getattr(ref.nucleus, n)[b].float()):
                    problems.append(n)
            if not close(out.nucleus.log_mass[b], ref.nucleus.log_mass[b]).all():
                problems.append("log_mass")
        if out.logprobs is not None and not close(out.logprobs[b], ref.logprobs[b]).all():
            problems.append("logprobs")
        tally.total += 1
        if ref.margin[b] < UNDECIDED:
            tally.undecided += 1
            tally.differ += bool(problems)
        else:
            shown = {n: (getattr(out, n)[b].tolist(), getattr(ref, n)[b].tolist()) for n in names}
            assert not problems, f"request {b}: {problems} differ, margin {float(ref.margin[b]):.2e}, {shown}"


def tensors_of(out) -> list[Tensor]:
    """Every tensor of an output, in order."""
    if isinstance(out, Tensor):
        return [out]
    return [t for part in out if part is not None for t in tensors_of(part)]


def assert_same_bits(a, b, what: str = "") -> None:
    """Bit equality of all tensors of two outputs (NaN equals NaN, 0.0 does not equal -0.0)."""
    a, b = tensors_of(a), tensors_of(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, what
        x, y = (t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (x, y))
        assert torch.equal(x, y), what


def create(*args, n=1, seed=0, **kw) -> sk.SamplingTensors:
    """Parameters of n requests with seeds seed, seed + 1, ..."""
    return sk.SamplingTensors.create(*args, **kw, seed=list(range(seed, seed + n)), batch_size=n)


def chain(target, drafts, backend, *, params=None, lengths=None, **kw) -> sk.VerifyOutput:
    """verify_chain of one request, or of `lengths`; greedy unless told otherwise."""
    drafts = torch.as_tensor(drafts)
    lengths = [drafts.numel()] if lengths is None else lengths
    params = create(0.0, n=len(lengths)) if params is None else params
    return sk.verify_chain(target, drafts, offsets(lengths), params, backend=backend, logprobs=1, **kw)
