"""Blocks of drafts from the target's own hidden states: DSpark (2607.05147)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import Nucleus, SamplingTensors, markov_step, schedule_lengths
from ..cache import RowCache, check_cache
from ..dspark_forward import DSparkForward
from ..dspark_model import DSparkModel
from ..transfers import on_device
from .base import DraftBatch, DraftContext, Drafter, StepOutcome
from .chains import chain_rows, gather_chains, proposal_keys
from .dspark_part import DSparkPart
from .pending_states import PendingStates

SCHEDULES = ("threshold", "budget", "throughput")


class DSparkDrafter(Drafter):
    """Drafts a block per step in one pass of a `DSparkModel` and samples it left to right with the request's own parameters.

    The target's states of the tapped layers become keys and values in a `RowCache` of the drafter's own once their tokens are
    committed, so nothing is ever rolled back; the block's own entries do not stay. States of steps without drafts wait and are
    taken in at once by the next one that has some.

    The whole block is always run, as in training, and min(budget, block_size) drafts of it are sampled. With a `schedule` fewer
    of them are verified, by the confidences c_k. c_k depends on the drafts before x_k and not on x_k; each schedule decides
    about x_k from c_1 .. c_k and, for other requests, from drafts that it has already decided to verify. So whether a draft is
    verified does not depend on its value, and the text keeps the target's law under every rule. On the CPU the drafts behind
    the last one that any request verifies are not sampled at all.

    Args:
        model: the drafter's network, made for or loaded with the target; or the part that has it.
        schedule: None verifies all; "threshold": the drafts that survive with c_1 · .. · c_k >= `threshold`; "budget": the
            `verify_budget` likeliest to survive of all requests' together; "throughput": those that raise the expected tokens per
            second at the decoder's measured costs (`DraftContext.relative_cost`; all where they are not known, so never with
            adaptive=False), both by `schedule_lengths`.
        threshold: in (0, 1].
        verify_budget: drafts per step in all, >= 1.
        packed: "auto" packs the matrices in float32 on the CPU (`DSparkForward`), True requires it, False does not.
        matmul_dtype: of the packed matrices in float32 models on the CPU, torch.float32 or torch.bfloat16; None: bfloat16 where the
            processor multiplies it natively. It changes drafts, not the law of the text; a seed's text under rules "token" and
            "block" depends on it as on all that drafts do.
        cache, page_size: of the drafter's context, as in `SpeculativeDecoder`.

    Raises:
        ValueError: an argument out of range, a schedule for a model without confidence head, or (from `check_target`) a target
            that does not fit, naming what differs.
    """

    def __init__(
        self, model: DSparkModel | DSparkPart, *, schedule: str | None = None, threshold: float = 0.3, verify_budget: int | None = None,
        packed: bool | str = "auto", matmul_dtype: torch.dtype | None = None, cache: str = "ragged", page_size: int = 16,
    ):  # fmt: skip
        if isinstance(model, DSparkPart):
            model = model.model
        if not isinstance(model, DSparkModel):
            raise ValueError(f"DSparkDrafter: model must be a DSparkModel, got {type(model).__name__}")
        if schedule is not None and schedule not in SCHEDULES:
            raise ValueError(f"DSparkDrafter: schedule must be None or one of {', '.join(SCHEDULES)}, got {schedule!r}")
        if schedule is not None and model.confidence_head is None:
            raise ValueError(
                f"DSparkDrafter: schedule must be None for a model without confidence head, got {schedule!r}"
            )
        if not 0 < threshold <= 1:
            raise ValueError(f"DSparkDrafter: threshold must be in (0, 1], got {threshold}")
        given = isinstance(verify_budget, int) and not isinstance(verify_budget, bool) and verify_budget >= 1
        if given != (schedule == "budget") or (not given and verify_budget is not None):
            raise ValueError(
                f'DSparkDrafter: verify_budget must be an int >= 1 with schedule="budget", None without, got {verify_budget!r}'
            )
        self.model, self.schedule = model, schedule
        self.threshold, self.verify_budget = threshold, verify_budget
        self.cache, self.page_size = check_cache("DSparkDrafter", cache, page_size), page_size
        self.taps = model.config.target_layer_ids
        self.chooses_length = schedule is not None
        self.calls = 0
        self.forward = DSparkForward(model, packed, matmul_dtype)
        self._target_to_draft = model.target_to_draft()
        self._tables = model.markov_tables()
        self._greedy = False
        self._pending = PendingStates("DSparkDrafter", ())
        self._cache: RowCache | None = None

    def check_target(self, target) -> None:
        self.model.check_target(target)
        if target is not self.model.target:
            raise ValueError("DSparkDrafter: model must be made for this target, got one made for another")

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingTensors, max_tokens: int) -> None:
        self.forward.refresh()
        self._tables = self.model.markov_tables()
        self._cache = self.forward.new_cache(
            len(prompts), max_tokens + self.model.config.block_size, self.cache, self.page_size
        )
        self._greedy = bool(params.greedy.all())
        self._pending = PendingStates("DSparkDrafter", prompts)

    @torch.inference_mode()
    def observe(self, outcome: StepOutcome) -> None:
        self._pending.add(outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        assert self._cache is not None
        self._cache.select_rows(rows)
        self._pending.select_rows(rows)

    def _take_in(self) -> RowCache:
        """The cache, with the context of every committed token."""
        assert self._cache is not None
        pending = self._pending.take()
        if pending is not None:
            self.forward.append(*pending, self._cache)
        return self._cache

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> DraftBatch | None:
        longest = min(max(context.budgets, default=0), self.model.config.block_size)
        if longest == 0:
            return None
        self.calls += 1
        cache = self._take_in()
        anchors = on_device([text[-1] for text in context.tokens], torch.int64, self.forward.device)
        hidden = self.forward.block(anchors, cache, longest)
        logits = self.forward.logits(hidden)
        budgets = [min(n, longest) for n in context.budgets]
        lengths = _Lengths(self, context, budgets)
        # Rule "coupled" and greedy requests never read q.
        keep_q = context.rule != "coupled" and not self._greedy
        tokens: list[Tensor] = []
        nuclei: list[Nucleus] = []
        before = anchors
        for k in range(longest):
            if self.schedule is not None and not lengths.wants(self.model.confidence_logits(hidden[:, k], before)):
                break
            # The bias is added to the row in place: the buffer of logits becomes the q that verification reads.
            row = logits[:, k]
            drawn = markov_step(
                row,
                before,
                *self._tables,
                context.params,
                **proposal_keys(context, k),
                target_to_draft=self._target_to_draft,
                return_nucleus=keep_q,
                logits_out=row,
            )
            tokens.append(drawn.tokens)
            if drawn.nucleus is not None:
                nuclei.append(drawn.nucleus)
            before = drawn.tokens.to(torch.int64)
        counts = lengths.final()
        if not tokens or not any(counts):
            return None
        rows = chain_rows(counts, len(tokens), anchors.device)
        return gather_chains(
            counts, rows, tokens, logits if keep_q else None, nuclei, context.params, self._target_to_draft
        )


class _Lengths:
    """How many drafts of each request one step verifies, decided while they are drawn.

    After c_k of every request is known the schedule is that of columns 1 .. k. Where it gives no request k drafts, none will get
    k or more whatever follows, as survival only falls along a request, and the lengths are final.
    """

    def __init__(self, drafter: DSparkDrafter, context: DraftContext, budgets: list[int]):
        self.drafter, self.budgets = drafter, budgets
        self.confidences: list[Tensor] = []
        self.lengths: list[int] | None = None
        self.steps_per_second = None
        self.all = drafter.schedule is None
        #: Elsewhere asking would wait for the device at every draft; all are drawn there.
        self.asks = context.position.device.type == "cpu"
        if drafter.schedule == "throughput":
            self.steps_per_second = _steps_per_second(context, budgets)
            self.all = self.steps_per_second is None

    def wants(self, confidence_logits: Tensor) -> bool:
        """Whether the draft of these confidences [B] has to be drawn for any request."""
        if self.all:
            return True
        self.confidences.append(torch.sigmoid(confidence_logits))
        if not self.asks:
            return True
        self.lengths = self._schedule()
        return max(self.lengths) == len(self.confidences)

    def final(self) -> list[int]:
        if self.all:
            return self.budgets
        return self.lengths if self.lengths is not None else self._schedule()

    def _schedule(self) -> list[int]:
        confidence = torch.stack(self.confidences, 1)
        drawn, drafter = confidence.shape[1], self.drafter
        most = on_device([min(n, drawn) for n in self.budgets], torch.int32, confidence.device)
        if drafter.schedule == "threshold":
            lengths = torch.minimum((confidence.cumprod(1) >= drafter.threshold).sum(1), most)
        elif drafter.schedule == "budget":
            lengths = schedule_lengths(confidence, most, budget=drafter.verify_budget)
        else:
            assert self.steps_per_second is not None
            table = self.steps_per_second.to(confidence.device)
            lengths = schedule_lengths(confidence, most, steps_per_second=table)
        return lengths.tolist()


def _steps_per_second(context: DraftContext, budgets: list[int]) -> Tensor | None:
    """float32 [B + D + 1] for `schedule_lengths`: steps per plain step's time of a verification over n tokens, for up to D drafts in
    all; None where costs are not known.

    Costs are known by drafts per request: M drafts cost what M / B each do, on a line between whole numbers. The block has been
    run whatever is verified of it, so that no drafts cost what the line through one and two of them says.
    """
    batch, most = len(budgets), max(budgets)
    known = [context.relative_cost(d) for d in range(1, max(most, 2) + 1)]
    if any(cost is None for cost in known):
        return None
    costs = [float(cost) for cost in known if cost is not None]
    costs.insert(0, max(min(2 * costs[0] - costs[1], costs[0]), 0.5 * costs[0]))
    table = [1.0 / costs[0]] * batch
    for drafts in range(sum(budgets) + 1):
        whole, part = divmod(drafts, batch)
        cost = costs[whole] + part / batch * (costs[min(whole + 1, len(costs) - 1)] - costs[whole])
        table.append(1.0 / cost)
    return torch.tensor(table, dtype=torch.float32)
