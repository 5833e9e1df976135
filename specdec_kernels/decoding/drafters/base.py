"""The interface between a decoder and whatever proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ... import Nucleus, SamplingTensors


@dataclass
class DraftContext:
    """What a drafter may look at for one step, for the B requests still running.

    Everything here is known before the step's randomness: numbers of drafts chosen from it do not depend on the drafted
    tokens, which verification needs to stay exact.

    tokens: committed token ids of each request, prompt included; the last one has not been through the target yet.
    position: int64 [B] on the device, absolute position of the next token = len(tokens[b]): the step's anchor.
    params: the requests' sampling parameters.
    budgets: most drafts wanted for each request, of a tree on one path; 0 near the end of a request.
    rule: "token", "block", "coupled" or "target_only".
    relative_cost: d -> measured cost of a step with at most d drafts over a plain step, None where not yet known.
    max_nodes: most drafts wanted of a request's tree.
    """

    tokens: list[list[int]]
    position: Tensor
    params: SamplingTensors
    budgets: list[int]
    rule: str
    relative_cost: Callable[[int], float | None]
    max_nodes: int = 16


@dataclass
class DraftBatch:
    """Proposals of one step in the layout of `verify_chain` or `verify_tree`.

    tokens: int32 or int64 [D], request-major, target ids.
    counts: drafts of each request, at most its budget, of a tree at most `max_nodes` and no deeper than the budget; sum is D.
    logits: [.., Vd] the drafts were sampled from, before temperature; None: deterministic drafts, or a rule that does
        not read q.
    rows: int64 [D], row of `logits` of each draft; None: draft j has row j.
    nucleus: Nucleus [D] saved while sampling, so that verification need not read the rows again.
    params: the parameters the drafts were sampled with; required with `logits`.
    target_to_draft: int [V], column of each target id in `logits` or -1; None: ids are the same.
    parents: int [D] for trees of drafts, None for chains: each draft's parent node within its request, as `verify_tree` takes
        them (0: the last token of the text; draft i of a request is its node i + 1, and parents come before their children;
        -1: the draft is not there).
    """

    tokens: Tensor
    counts: list[int]
    logits: Tensor | None = None
    rows: Tensor | None = None
    nucleus: Nucleus | None = None
    params: SamplingTensors | None = None
    target_to_draft: Tensor | None = None
    parents: Tensor | None = None


@dataclass
class StepOutcome:
    """What verification made of a step, for every running request; also given after steps without drafts.

    tokens: tokens each request emitted, cut at its end of sequence or length.
    drafted, accepted: drafts verified and accepted of each request.
    hidden: [n, T * H] for drafters that set `taps`, else None: the target's states of the tokens that went through it in this
        step and stay, request-major: each request's last token and its accepted drafts, in the first step the whole prompt.
    paths: of trees, the accepted nodes of each request; None for chains, whose accepted drafts are the first ones.
    """

    tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    hidden: Tensor | None = None
    paths: list[list[int]] | None = None


class Drafter(ABC):
    """Proposes the next tokens of each request.

    A decoder calls `begin` once per batch, then for every step `propose` (unless it wants no drafts) and `observe`, and
    `select_rows` when requests finish. Subclasses keep per-request state in the order of the running requests.
    """

    #: True where proposals are functions of the text (one-hot q): rule "coupled" then accepts as often as "token".
    deterministic: bool = False
    #: Chooses the numbers of drafts by itself, below its budgets.
    chooses_length: bool = False
    #: Proposals are trees.
    trees: bool = False
    #: Drafts verified at a time while the next ones are drafted; None: all of a step. Such a drafter has `rewind`.
    block_size: int | None = None
    #: Layers of the target whose output states `observe` is given, 0 for the first; -1: what the LM head reads.
    taps: Sequence[int] = ()
    #: Forwards of a draft model so far.
    calls: int = 0

    @abstractmethod
    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingTensors, max_tokens: int) -> None:
        """Starts a batch of prompts; no request will have more than `max_tokens` tokens in all."""

    @abstractmethod
    def propose(self, context: DraftContext) -> DraftBatch | None:
        """Drafts for the next step; None, or counts of 0, for none."""

    def observe(self, outcome: StepOutcome) -> None:  # noqa: B027  stateless drafters need none
        """Takes in what the step emitted and rolls state back to it."""

    def select_rows(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Keeps the state of `rows` (ascending indices among the running requests)."""

    def rewind(self, lengths: Sequence[int], ahead: int = 0) -> None:
        """Of drafters with a `block_size`: forgets what it has read behind the first lengths[b] tokens of each request. What it
        has proposed is not observed then; `propose` gets texts with the drafts that are still to be verified at their ends."""
        raise NotImplementedError

    def attach(self, forward) -> None:  # noqa: B027
        """Takes note of the target's `ModelForward`, for drafters that share something with it; before the first `begin`."""

    def check_target(self, target) -> None:  # noqa: B027
        """Raises ValueError where the target model cannot be drafted for."""
