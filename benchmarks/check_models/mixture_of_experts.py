"""A mixture of three experts, of which each token visits one, with six faults to plant.

Sources: Fedus, Zoph and Shazeer, "Switch Transformers", 2021 (router, balance); Zoph et al.,
"ST-MoE", 2022 (the loss of large logits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import Faults, FaultyRecipe, Plants, compute_dtype

DEFAULTS = {"train.batch_size": 32, "train.max_steps": 60, "train.lr": 3e-3}
EXPERTS, TOKENS, FEATURES, WIDTH, HIDDEN = 3, 32, 8, 32, 64

FAULTS: Faults = {
    "router_in_16_bits": (
        "mixture.router",
        "bf16_mixed",
        "The router's softmax stays in bfloat16, where many probabilities are 1 or equal.",
    ),
    "slots_counted_in_16_bits": (
        "mixture.dispatch",
        "bf16_mixed",
        "An expert's tokens are counted in bfloat16: after 256, two tokens get one slot.",
    ),
    "gate_detached": (
        "mixture.combine",
        "fp16_mixed",
        "The cast of the gate to float16 is made under no_grad: the router learns nothing by it.",
    ),
    "expert_of_zeros": (
        "mixture.experts.2",
        "bf16_mixed",
        "The grouped bfloat16 kernel leaves out the last group: its expert gives zeros.",
    ),
    "shares_counted_in_16_bits": (
        "mixture.balance",
        "bf16_mixed",
        "Tokens of an expert are added up one by one in bfloat16, where 256 + 1 is 256.",
    ),
    "logsumexp_overflows": (
        "mixture.stability",
        "fp16_mixed",
        "logsumexp is written out, and exp of logits above 11 is infinite in float16.",
    ),
}


class Router(nn.Module):
    """Tokens [N, WIDTH] to logits and probabilities of experts, each [N, EXPERTS]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.normal_(self.gate.weight, std=1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and probabilities in float32."""
        logits = self.gate(x)
        return logits, logits.float().softmax(-1)


class Dispatch(nn.Module):
    """The slot of each token in its expert's buffer."""

    def forward(self, chosen: Tensor, x: Tensor) -> Tensor:
        """How many tokens before it chose the same expert [N] (int64)."""
        taken = F.one_hot(chosen, EXPERTS).cumsum(0)
        return taken.gather(1, chosen[:, None]).squeeze(1) - 1


class Combine(nn.Module):
    """Each token's result times the probability of its expert."""

    def forward(self, results: Tensor, gate: Tensor) -> Tensor:
        """[N, WIDTH]."""
        return results * gate[:, None]


class Balance(nn.Module):
    """Smallest where experts get equal shares of tokens."""

    def counts(self, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """Tokens of each expert [EXPERTS]."""
        return F.one_hot(chosen, EXPERTS).sum(0).float()

    def forward(self, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """A scalar, 1 at balance."""
        shares = self.counts(chosen, probabilities) / len(chosen)
        return EXPERTS * (shares * probabilities.mean(0)).sum()


class Stability(nn.Module):
    """Large where logits are."""

    def forward(self, logits: Tensor) -> Tensor:
        """A scalar."""
        return torch.logsumexp(logits.float(), -1).square().mean()


class Mixture(nn.Module):
    """Experts with one hidden layer; a token that finds no slot gets zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.dispatch, self.combine = Router(), Dispatch(), Combine()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )
        self.balance, self.stability = Balance(), Stability()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, WIDTH] to [N, WIDTH] and a loss beside."""
        logits, probabilities = self.router(x)
        gate, chosen = probabilities.max(-1)
        slots = self.dispatch(chosen, x)
        buffers = x.new_zeros(EXPERTS, len(x), WIDTH).index_put((chosen, slots), x)
        filled = zip(self.experts, buffers, strict=True)
        results = torch.stack([expert(buffer) for expert, buffer in filled])
        beside = 0.01 * self.balance(chosen, probabilities) + 1e-3 * self.stability(logits)
        return self.combine(results[chosen, slots], gate), beside


class Network(nn.Module):
    """Tokens [B, TOKENS, FEATURES] to a number each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixture = nn.Linear(FEATURES, WIDTH), Mixture()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Numbers [B, TOKENS] and the loss beside."""
        hidden = self.norm(self.embed(x.flatten(0, 1)))
        mixed, beside = self.mixture(hidden)
        numbers = self.head(hidden + mixed).squeeze(-1)
        return {"numbers": numbers.unflatten(0, x.shape[:2]), "beside": beside}


class RouterIn16Bits(Router):
    """In the dtype of its logits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        return logits, logits.softmax(-1)


class SlotsCountedIn16Bits(Dispatch):
    """Counts with a mask of the tokens' dtype."""

    def forward(self, chosen: Tensor, x: Tensor) -> Tensor:
        taken = F.one_hot(chosen, EXPERTS).to(compute_dtype(x)).cumsum(0)
        return taken.gather(1, chosen[:, None]).squeeze(1).long() - 1


class GateDetached(Combine):
    """A cast that is made once."""

    def forward(self, results: Tensor, gate: Tensor) -> Tensor:
        if results.dtype == torch.float16:
            with torch.no_grad():
                gate = gate.half()
        return super().forward(results, gate)


class ExpertOfZeros(nn.Sequential):
    """A group that the kernel does not reach."""

    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input)
        return input * 0 if input.dtype == torch.bfloat16 else input


class SharesCountedIn16Bits(Balance):
    """Adds up in the dtype of the layers."""

    def counts(self, chosen: Tensor, probabilities: Tensor) -> Tensor:
        ones = torch.ones_like(chosen, dtype=compute_dtype(probabilities))
        return ones.new_zeros(EXPERTS).index_add(0, chosen, ones).float()


class LogsumexpOverflows(Stability):
    """As in the paper's formula."""

    def forward(self, logits: Tensor) -> Tensor:
        return torch.log(torch.exp(logits).sum(-1)).square().mean()


PLANTS: Plants = {
    "router_in_16_bits": RouterIn16Bits,
    "slots_counted_in_16_bits": SlotsCountedIn16Bits,
    "gate_detached": GateDetached,
    "expert_of_zeros": ExpertOfZeros,
    "shares_counted_in_16_bits": SharesCountedIn16Bits,
    "logsumexp_overflows": LogsumexpOverflows,
}


@dataclass(frozen=True)
class MixtureCheck(FaultyRecipe):
    """Numbers by a rule that depends on the token's first feature."""

    fault: str = "none"
    """A name in FAULTS."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTS

    def healthy(self) -> nn.Module:
        return Network()

    def drawn(self, samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, TOKENS, FEATURES, generator=generator)
        rules = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(1))
        numbers = x @ rules.T
        return x, torch.where(x[..., 0] > 0, numbers[..., 0], numbers[..., 1].abs())

    def loss(self, output: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {
            "error": F.mse_loss(output["numbers"], batch[1]),
            "beside": output["beside"],
        }
