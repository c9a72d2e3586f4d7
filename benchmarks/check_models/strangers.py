"""Twelve models of twelve kinds, written as their users write them, each with faults to plant.

    python -m mprun check recipe=benchmarks/check_models/strangers.py recipe.model.name=pinn
    python -m benchmarks.check_faults --only strangers --strangers 36

No threshold of `mprun check` was chosen on them. `recipe.model.fault=NAME` plants a fault of
`FAULTY` in the model that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import NONE, Faults, FaultyRecipe, Plants, compute_dtype

DEFAULTS = {"train.batch_size": 16, "train.max_steps": 60, "train.lr": 2e-3}
CLASSES, TOKENS, LENGTH, WIDTH = 4, 24, 12, 32


class Stranger(NamedTuple):
    """A model, its samples and its loss."""

    build: Callable[[], nn.Module]
    draw: Callable[[int, Generator], Any]
    loss: Callable[[Any, Any], Any]


def squared_error(output: Tensor, batch: Any) -> Tensor:
    """Of the last tensor of the batch."""
    return F.mse_loss(output, batch[-1])


def of_classes(output: Tensor, batch: Any) -> Tensor:
    """Of logits [B, CLASSES]."""
    return F.cross_entropy(output, batch[-1])


# ---- diffusion: a UNet that predicts the noise of an image ---------------------------------------


class TimeEmbedding(nn.Module):
    """Steps [B] to sines and cosines, through two layers: [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def angles(self, t: Tensor) -> Tensor:
        """[B, WIDTH / 2]."""
        rates = torch.exp(-math.log(1000) * torch.arange(WIDTH // 2, device=t.device) / 16)
        return t[:, None].float() * rates

    def forward(self, t: Tensor) -> Tensor:
        angles = self.angles(t)
        embedded: Tensor = self.layers(torch.cat([angles.sin(), angles.cos()], dim=1))
        return embedded


class AnglesIn16Bits(TimeEmbedding):
    """Steps of up to 1,000 have no digit after the point in bfloat16."""

    def angles(self, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1000) * torch.arange(WIDTH // 2, device=t.device) / 16)
        return t[:, None].to(torch.bfloat16) * rates.to(torch.bfloat16)


class ChannelNorm(nn.Module):
    """Each channel of each image to mean 0 and deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        centred = x - x.mean((2, 3), keepdim=True)
        return centred / (centred.square().mean((2, 3), keepdim=True).sqrt() + 1e-8)


class EpsilonVanishes(ChannelNorm):
    """The same in the dtype of the convolution: 1e-8 is 0 in float16."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        centred = x - x.mean((2, 3), keepdim=True)
        return centred / (centred.square().mean((2, 3), keepdim=True).sqrt() + 1e-8)


class ResBlock(nn.Module):
    """Two convolutions; the time is added between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm = ChannelNorm()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(WIDTH, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm(x))) + self.time(t)[:, :, None, None]
        result: Tensor = self.second(F.silu(h)) + self.skip(x)
        return result


class DiffusionUnet(nn.Module):
    """Noisy images [B, 3, 16, 16] and steps [B] to the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.time = TimeEmbedding()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.down = ResBlock(16, 32)
        self.middle = ResBlock(32, 32)
        self.up = ResBlock(32 + 16, 16)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, images: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        share = (t.float() / 1000)[:, None, None, None]
        x = self.enter((1 - share).sqrt() * images + share.sqrt() * noise)
        embedded = self.time(t)
        h = self.middle(self.down(F.avg_pool2d(x, 2), embedded), embedded)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        out: Tensor = self.leave(self.up(torch.cat([h, x], dim=1), embedded))
        return out


def noisy_images(samples: int, generator: Generator) -> tuple[Tensor, ...]:
    """Smooth images, steps, noise; the last of a batch is no input."""
    small = torch.randn(samples, 3, 4, 4, generator=generator)
    images = F.interpolate(small, scale_factor=4.0, mode="bilinear")
    t = torch.randint(1, 1000, (samples,), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    return images, t, noise, noise


# ---- a mixture of experts that keeps its balance loss --------------------------------------------


class Router(nn.Linear):
    """Probabilities of the experts."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float().softmax(-1)


class DetachedRouter(Router):
    """No gradient in 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        shares = super().forward(input)
        is_low = compute_dtype(input) in (torch.float16, torch.bfloat16)
        return shares.detach() if is_low else shares


class MixtureOfExperts(nn.Module):
    """The best two of four experts for each token; `aux` is the balance loss of the last pass."""

    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )

    def balance(self, shares: Tensor, chosen: Tensor) -> Tensor:
        """Switch Transformer's: shares of the tokens times mean probabilities."""
        used = F.one_hot(chosen[:, 0], 4).float().mean(0)
        return 4 * (used * shares.mean(0)).sum()

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x)
        weights, chosen = shares.topk(2, dim=-1)
        self.aux = self.balance(shares, chosen)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            token, place = (chosen == n).nonzero(as_tuple=True)
            part = expert(x[token]) * weights[token, place, None]
            out = out.index_add(0, token, part.to(out.dtype))
        return out


class MoeClassifier(nn.Module):
    """Tokens [B, LENGTH] to logits and the balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.mixture = MixtureOfExperts()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        x = self.norm(x + self.mixture(x.flatten(0, 1)).view_as(x))
        return self.head(x.mean(1)), self.mixture.aux


class BalanceOfCounts(MixtureOfExperts):
    """The counts of tokens are added up in the dtype of the layers."""

    def balance(self, shares: Tensor, chosen: Tensor) -> Tensor:
        used = F.one_hot(chosen[:, 0], 4).to(torch.bfloat16).cumsum(0)[-1] / len(chosen)
        low = shares.to(torch.bfloat16).cumsum(0)[-1] / len(chosen)
        return 4 * (used * low).sum().float()


def with_balance(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """The loss of the classes, and a hundredth of the balance loss."""
    logits, aux = output
    return F.cross_entropy(logits, batch[-1]) + 0.01 * aux


def counted_tokens(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and the class: that of the first one."""
    tokens = torch.randint(TOKENS, (samples, LENGTH), generator=generator)
    kinds = tokens[:, 0] % CLASSES
    tokens[:, 1:] = (tokens[:, :1] + torch.arange(1, LENGTH)) % TOKENS
    return tokens, kinds


# ---- a PINN: Poisson's equation in one dimension -------------------------------------------------


class Pinn(nn.Module):
    """Points [B, 1] to u, u'' + f, and u at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def given(self, x: Tensor) -> Tensor:
        """The points as the network reads them."""
        return x

    def u(self, x: Tensor) -> Tensor:
        """The solution."""
        h = torch.tanh(self.first(self.given(x)))
        out: Tensor = self.last(torch.tanh(self.second(h)))
        return out

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        ends = self.u(torch.tensor([[0.0], [1.0]], device=x.device, dtype=x.dtype))
        return bend + math.pi**2 * torch.sin(math.pi * x.detach()), ends


class RoundedPoints(Pinn):
    """Points that have been rounded once."""

    def given(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()


def residual(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """Of the equation, and of the ends."""
    inside, ends = output
    return inside.square().mean() + 10 * ends.square().mean()


def points(samples: int, generator: Generator) -> tuple[Tensor]:
    """Between 0 and 1."""
    return (torch.rand(samples, 1, generator=generator),)


# ---- a graph network by index_add ----------------------------------------------------------------


class Convolution(nn.Module):
    """Messages along edges, added up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def added(self, x: Tensor, ends: Tensor, messages: Tensor) -> Tensor:
        """[nodes, WIDTH]."""
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, ends, messages.float())

    def forward(self, x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        messages = F.relu(self.message(torch.cat([x[starts], x[ends]], dim=-1)))
        return F.relu(self.update(torch.cat([x, self.added(x, ends, messages)], dim=-1))) + x


class RunningSum(Convolution):
    """A node's sum is the difference of two running sums, which have 16 bits."""

    def added(self, x: Tensor, ends: Tensor, messages: Tensor) -> Tensor:
        order = ends.argsort(stable=True)
        running = messages[order].to(compute_dtype(messages)).cumsum(0)
        last = torch.bincount(ends, minlength=len(x)).cumsum(0) - 1
        sums = running[last]
        return torch.cat([sums[:1], sums[1:] - sums[:-1]]).float()


class GraphNetwork(nn.Module):
    """Features [B, 40, 8] of nodes on a star, and a ring, to a number of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.first = Convolution()
        self.second = Convolution()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        graphs, nodes, _ = features.shape
        own = torch.arange(nodes, device=features.device)
        starts = torch.cat([own, own])
        ends = torch.cat([own.roll(1), torch.zeros_like(own)])
        shift = (nodes * torch.arange(graphs, device=features.device))[:, None]
        x = self.enter(features.flatten(0, 1))
        for layer in (self.first, self.second):
            x = layer(x, (starts + shift).flatten(), (ends + shift).flatten())
        out: Tensor = self.head(x.view(graphs, nodes, WIDTH).sum(1)).squeeze(-1)
        return out


def graphs(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Features, and the energy of neighbours: numbers of tens."""
    features = torch.randn(samples, 40, 8, generator=generator)
    energy = (features * features.roll(1, 1)).sum((1, 2)) + 20
    return features, energy


# ---- sequence to sequence with teacher forcing ---------------------------------------------------


class Reverser(nn.Module):
    """Tokens [B, LENGTH] to logits of the same backwards; the decoder reads the right tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.embed(tokens))
        shifted = F.pad(target[:, :-1], (1, 0))
        hidden, _ = self.decoder(self.embed(shifted), state)
        logits: Tensor = self.head(hidden)
        return logits


def of_tokens(output: Tensor, batch: Any) -> Tensor:
    """Of logits [B, L, TOKENS]."""
    return F.cross_entropy(output.flatten(0, 1), batch[-1].flatten())


def reversed_tokens(samples: int, generator: Generator) -> tuple[Tensor, ...]:
    """Counting sequences, and the same backwards."""
    start = torch.randint(TOKENS, (samples, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH)) % (TOKENS - 1) + 1
    return tokens, tokens.flip(1), tokens.flip(1)


class SlidingMean(nn.Linear):
    """Logits of the mean of the last two steps, by running sums from the first step on."""

    def forward(self, input: Tensor) -> Tensor:
        running = (8 + input.to(compute_dtype(input))).cumsum(1)
        near = running - F.pad(running[:, :-2], (0, 0, 2, 0))
        return super().forward(near / 2 - 8)


# ---- a GAN in one step ---------------------------------------------------------------------------


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Critic(nn.Module):
    """Points to logits of being real."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Gan(nn.Module):
    """Both logits; the generator's gradient is that of the critic's loss, reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = Critic()

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        made = _Reversed.apply(self.generator(noise))
        return self.critic(real), self.critic(made)


class ScaledCritic(Critic):
    """Another temperature where a kernel of 16 bits is used."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 0.9 if out.dtype == torch.bfloat16 else out


def real_or_made(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """The critic's loss."""
    real, made = output
    of, one = F.binary_cross_entropy_with_logits, batch[-1]
    return of(real, one) + of(made, 1 - one)


def ring(samples: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noise, points on a ring, and their label."""
    angle = 2 * math.pi * torch.rand(samples, generator=generator)
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    return torch.randn(samples, 8, generator=generator), real, torch.ones(samples, 1)


# ---- a VAE ---------------------------------------------------------------------------------------


class Whiten(nn.Module):
    """Each feature of the batch to mean 0 and deviation 1, without weights."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()


class VarianceOfSquares(Whiten):
    """The mean of squares less the square of the mean, in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        variance = (x * x).mean(0) - x.mean(0).square()
        return ((x - x.mean(0)) / (variance.clamp_min(0) + 1e-3).sqrt()).float()


class Spread(nn.Module):
    """Log-variances to deviations."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(0.5 * x.float())


class SpreadOverflows(Spread):
    """exp(12 + x) in the dtype of the layers is infinite in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(0.5 * x + 12).to(x.dtype).float() * math.exp(-12)


class TableVae(nn.Module):
    """Rows [B, 16], with a mean of 100, to a reconstruction, a mean and a log-variance."""

    def __init__(self) -> None:
        super().__init__()
        self.whiten = Whiten()
        self.encode = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.spread = Spread()
        self.decode = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.whiten(rows)
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        drawn = mean + self.spread(log_variance) * torch.randn_like(mean)
        return self.decode(drawn), x, mean, log_variance


def evidence(output: tuple[Tensor, ...], batch: Any) -> Tensor:
    """The negative lower bound, by sample."""
    made, x, mean, log_variance = (t.float() for t in output)
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1) / 2
    return ((made - x).square().sum(-1) + 0.1 * divergence).mean()


def table(samples: int, generator: Generator) -> tuple[Tensor]:
    """Rows of four hidden numbers, around 100."""
    hidden = torch.randn(samples, 4, generator=generator)
    return (100 + hidden @ torch.randn(4, 16, generator=generator),)


# ---- a tiny ViT ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Four heads, written out; patches that are blank are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def scores(self, q: Tensor, k: Tensor, blank: Tensor) -> Tensor:
        """[B, 4, L, L]."""
        scores = (q @ k.transpose(-1, -2)) * (WIDTH // 4) ** -0.5
        result: Tensor = scores.masked_fill(blank, torch.finfo(scores.dtype).min)
        return result

    def forward(self, x: Tensor, blank: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = self.scores(split[0], split[1], blank[:, None, None]).softmax(-1)
        out: Tensor = self.out(
            (weights.to(x.dtype) @ split[2].to(x.dtype)).transpose(1, 2).flatten(2)
        )
        return out


class MaskOverflows(Attention):
    """-1e9 is no number of float16."""

    def scores(self, q: Tensor, k: Tensor, blank: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * (WIDTH // 4) ** -0.5
        result: Tensor = scores + blank.to(scores.dtype) * -1e9
        return result


class UnscaledScores(Attention):
    """Queries are scaled up before the product and the scores down after it."""

    def scores(self, q: Tensor, k: Tensor, blank: Tensor) -> Tensor:
        scores = ((q * 4096) @ k.transpose(-1, -2)) * (WIDTH // 4) ** -0.5 / 4096
        result: Tensor = scores.masked_fill(blank, torch.finfo(scores.dtype).min)
        return result


class TinyVit(nn.Module):
    """Images [B, 3, 16, 16] to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        blank = F.max_pool2d(images.abs().amax(1), 4).flatten(1) == 0
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        x = x + self.attention(self.norm1(x), blank)
        x = x + self.mlp(self.norm2(x))
        out: Tensor = self.head(x.mean(1))
        return out


def stripes(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Stripes of four widths; the last rows of half the images are blank."""
    kinds = torch.randint(CLASSES, (samples,), generator=generator)
    rate = (0.4 + 0.5 * kinds)[:, None, None, None]
    waves = torch.sin(rate * torch.arange(16)).expand(samples, 3, 16, 16)
    images = waves + 0.2 * torch.randn(samples, 3, 16, 16, generator=generator)
    images[::2, :, 12:] = 0
    return images, kinds


# ---- an LSTM -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM with a first state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(2, len(x), WIDTH)
        out: Tensor = self.lstm(x, (state, state))[0]
        return out


class StateOfOneDtype(Recurrent):
    """The last hidden values meet a matrix that was cast for speed."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        eye = torch.eye(WIDTH, dtype=torch.float64, device=x.device).to(compute_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            return out.float() @ eye


class Forecaster(nn.Module):
    """Series [B, 24, 6] to the next value of each."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Recurrent()
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(x)[:, -1])
        return out


def clipped_before_unscaling(head: nn.Linear) -> None:
    """Plant a clip of the scaled gradient."""
    head.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))


def series(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Sines of other rates, and what comes next."""
    rate = 0.2 + 0.6 * torch.rand(samples, 1, 6, generator=generator)
    waves = torch.sin(rate * torch.arange(25)[:, None])
    return waves[:, :-1].contiguous(), waves[:, -1].contiguous()


# ---- a Siamese network with a margin loss --------------------------------------------------------


class Centre(nn.Module):
    """Less the running mean, which is kept over steps."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean(0).to(self.mean.dtype), 1e-3)
        return x - self.mean.to(x.dtype)


def average_in_16_bits(centre: Centre) -> None:
    """Plant a mean in bfloat16: a thousandth of the distance is below half a unit."""
    centre.mean = torch.ones(16, dtype=torch.bfloat16)


class Distance(nn.Module):
    """Euclid's, with a small number under the root."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return ((a - b).float().square().sum(-1) + 1e-6).sqrt()


class RootOfZero(Distance):
    """In float16, 1e-8 is 0, and so is the distance of a pair of equal images."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        low = (a - b).to(compute_dtype(a))
        return ((low * low).sum(-1).to(low.dtype) + 1e-8).sqrt().float()


class Pairs(nn.Module):
    """Two rows [B, 20] each, and their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
        self.centre = Centre()
        self.distance = Distance()

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        out: Tensor = self.distance(self.centre(self.tower(one)), self.centre(self.tower(two)))
        return out


def margin(output: Tensor, batch: Any) -> Tensor:
    """Equal pairs near, others a margin of 1 apart."""
    same = batch[-1]
    result: Tensor = (same * output.square() + (1 - same) * F.relu(1 - output).square()).mean()
    return result


def row_pairs(samples: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs; an eighth of them are twice the same row."""
    centres = torch.randn(4, 20, generator=generator)
    first, second = torch.randint(4, (2, samples), generator=generator)
    one = centres[first] + 0.3 * torch.randn(samples, 20, generator=generator)
    two = centres[second] + 0.3 * torch.randn(samples, 20, generator=generator)
    two[::8], second[::8] = one[::8], first[::8]
    return one, two, (first == second).float()


# ---- a policy gradient ---------------------------------------------------------------------------


class Advantage(nn.Module):
    """Rewards [B, T] to discounted returns, standardized."""

    def returns(self, rewards: Tensor) -> Tensor:
        """Added up from the end."""
        out, total = [], torch.zeros_like(rewards[:, 0])
        for reward in rewards.flip(1).unbind(1):
            total = reward + 0.99 * total
            out.append(total)
        return torch.stack(out[::-1], dim=1)

    def forward(self, rewards: Tensor) -> Tensor:
        returns = self.returns(rewards)
        return ((returns - returns.mean()) / (returns.std() + 1e-8)).detach()


class ReturnsIn16Bits(Advantage):
    """A running sum in bfloat16."""

    def returns(self, rewards: Tensor) -> Tensor:
        return rewards.to(torch.bfloat16).flip(1).cumsum(1).flip(1).float()


class Policy(nn.Module):
    """States [B, T, 5], actions and rewards to log-probabilities, entropies and advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
        self.advantage = Advantage()

    def forward(self, states: Tensor, actions: Tensor, rewards: Tensor) -> tuple[Tensor, ...]:
        log_p = self.body(states).float().log_softmax(-1)
        taken = log_p.gather(-1, actions[..., None]).squeeze(-1)
        return taken, -(log_p.exp() * log_p).sum(-1), self.advantage(rewards)


def policy_loss(output: tuple[Tensor, ...], batch: Any) -> Tensor:
    """REINFORCE with a bonus for entropy."""
    taken, entropy, advantage = output
    return -(taken * advantage).mean() - 0.01 * entropy.mean()


def episodes(samples: int, generator: Generator) -> tuple[Tensor, ...]:
    """Random actions; the one that the state's largest of three numbers names is rewarded."""
    states = torch.randn(samples, 30, 5, generator=generator)
    actions = torch.randint(3, (samples, 30), generator=generator)
    hit = states[..., :3].argmax(-1) == actions
    rewards = hit + torch.rand(samples, 30, generator=generator)
    return states, actions, rewards, rewards


# ---- DLRM ----------------------------------------------------------------------------------------


class Interaction(nn.Module):
    """Products of all pairs of vectors [B, F, WIDTH]."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
        return (x @ x.transpose(1, 2))[:, rows, columns]


class HalfAndBack(Interaction):
    """A cast of a former kernel that was forgotten."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half().float())


class Dlrm(nn.Module):
    """Numbers [B, 6] and categories [B, 3, 4] to the logit of a click."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 16))
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3))
        self.interaction = Interaction()
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        bags = [bag(categories[:, n]) for n, bag in enumerate(self.bags)]
        x = torch.stack([dense.float(), *bags], dim=1)
        out: Tensor = self.top(torch.cat([dense, self.interaction(x)], dim=1)).squeeze(-1)
        return out


def rounded_table(bag: nn.EmbeddingBag) -> None:
    """Plant a table that was read from a checkpoint of 16 bits."""
    bag.weight.data = bag.weight.data.bfloat16().float()


def of_clicks(output: Tensor, batch: Any) -> Tensor:
    """Of one logit a sample."""
    return F.binary_cross_entropy_with_logits(output, batch[-1])


def clicks(samples: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, categories, and whether it was clicked."""
    numbers = torch.randn(samples, 6, generator=generator)
    categories = torch.randint(50, (samples, 3, 4), generator=generator)
    odd = (categories[:, 0] % 2).float().sum(-1) - 2
    return numbers, categories, (numbers[:, 0] + odd > 0).float()


# ---- all of them ---------------------------------------------------------------------------------

MODELS = {
    "diffusion_unet": Stranger(DiffusionUnet, noisy_images, squared_error),
    "moe_aux": Stranger(MoeClassifier, counted_tokens, with_balance),
    "pinn": Stranger(Pinn, points, residual),
    "gnn": Stranger(GraphNetwork, graphs, squared_error),
    "seq2seq": Stranger(Reverser, reversed_tokens, of_tokens),
    "gan": Stranger(Gan, ring, real_or_made),
    "vae_of_rows": Stranger(TableVae, table, evidence),
    "tiny_vit": Stranger(TinyVit, stripes, of_classes),
    "lstm_forecast": Stranger(Forecaster, series, squared_error),
    "siamese_margin": Stranger(Pairs, row_pairs, margin),
    "policy_gradient": Stranger(Policy, episodes, policy_loss),
    "dlrm": Stranger(Dlrm, clicks, of_clicks),
}

# Name to: its model, and what `FAULTS` of other files has
FAULTY = {
    "angles_in_16_bits": (
        "diffusion_unet",
        "time",
        "bf16_mixed",
        "Angles of up to 1,000 in bfloat16.",
    ),
    "epsilon_vanishes": ("diffusion_unet", "down.norm", "fp16_mixed", "1e-8 is 0 in float16."),
    "router_detached": ("moe_aux", "mixture.router", "bf16_mixed", "No gradient in 16 bits."),
    "balance_in_16_bits": ("moe_aux", "mixture", "bf16_mixed", "Counts by cumsum in bfloat16."),
    "rounded_points": ("pinn", "", "bf16_mixed", "Coordinates are rounded to bfloat16 and back."),
    "running_sum": ("gnn", "first", "bf16_mixed", "Differences of sums in bfloat16."),
    "sliding_mean": ("seq2seq", "head", "bf16_mixed", "Differences of sums in bfloat16."),
    "scaled_in_16_bits": ("gan", "critic", "bf16_mixed", "Logits times 0.9 in bfloat16."),
    "variance_of_squares": ("vae_of_rows", "whiten", "bf16_mixed", "E[x^2] - E[x]^2 in bfloat16."),
    "spread_overflows": ("vae_of_rows", "spread", "fp16_mixed", "exp(12 + x) in float16."),
    "mask_overflows": ("tiny_vit", "attention", "fp16_mixed", "-1e9 in float16."),
    "unscaled_scores": ("tiny_vit", "attention", "fp16_mixed", "Scores times 4,096 in float16."),
    "two_dtypes": ("lstm_forecast", "recurrent", "bf16_mixed", "A float32 and a bfloat16 matrix."),
    "clipped_before": ("lstm_forecast", "head", "fp16_mixed", "A clip of the scaled gradient."),
    "average_in_16_bits": ("siamese_margin", "centre", "bf16_mixed", "A mean that stands still."),
    "root_of_zero": ("siamese_margin", "distance", "fp16_mixed", "The root of 0 has no gradient."),
    "returns_in_16_bits": ("policy_gradient", "advantage", "bf16_mixed", "A sum in bfloat16."),
    "half_and_back": ("dlrm", "interaction", "bf16_mixed", "A forgotten .half().float()."),
    "rounded_table": ("dlrm", "bags.1", "bf16_mixed", "Weights of a bfloat16 checkpoint."),
}
FAULTS: Faults = {name: row[1:] for name, row in FAULTY.items()}
PLANTED: Plants = {
    "angles_in_16_bits": AnglesIn16Bits,
    "epsilon_vanishes": EpsilonVanishes,
    "router_detached": DetachedRouter,
    "balance_in_16_bits": BalanceOfCounts,
    "rounded_points": RoundedPoints,
    "running_sum": RunningSum,
    "sliding_mean": SlidingMean,
    "scaled_in_16_bits": ScaledCritic,
    "variance_of_squares": VarianceOfSquares,
    "spread_overflows": SpreadOverflows,
    "mask_overflows": MaskOverflows,
    "unscaled_scores": UnscaledScores,
    "two_dtypes": StateOfOneDtype,
    "clipped_before": clipped_before_unscaling,
    "average_in_16_bits": average_in_16_bits,
    "root_of_zero": RootOfZero,
    "returns_in_16_bits": ReturnsIn16Bits,
    "half_and_back": HalfAndBack,
    "rounded_table": rounded_table,
}


@dataclass(frozen=True)
class StrangersModel(FaultyRecipe):
    """One of `MODELS`, with a fault of `FAULTY` or without."""

    name: str = "pinn"
    """A name in MODELS; with a fault, the model is that of the fault."""
    fault: str = NONE
    """A name in FAULTY."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in MODELS:
            raise ValueError(f"name={self.name}: legal is {', '.join(MODELS)}")

    @property
    def kind(self) -> Stranger:
        """The row of `MODELS`."""
        return MODELS[self.name if self.fault == NONE else FAULTY[self.fault][0]]

    def healthy(self) -> nn.Module:
        return self.kind.build()

    def drawn(self, samples: int, generator: Generator) -> Any:
        return self.kind.draw(samples, generator)

    def loss(self, output: Any, batch: Any) -> Any:
        return self.kind.loss(output, batch)
