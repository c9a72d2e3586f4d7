"""Healthy models of many kinds, for counting the false alarms of `mprun check`.

    python -m mprun check recipe=benchmarks/check_models/healthy.py recipe.model.name=resnet18

Those of transformers need `pip install transformers`. All sizes are small, all weights random, all
data generated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
import torchvision
from torch import Generator, Tensor, nn
from torchvision.models.convnext import CNBlockConfig

from mprun import Recipe
from mprun.errors import UsageError
from mprun.train.data import DataRequest, Splits, TensorSet

DEFAULTS = {"train.batch_size": 8, "train.max_steps": 60, "train.lr": 2e-3}
SAMPLES = 32
CLASSES, SIDE, TOKENS, LENGTH = 4, 32, 32, 16
Draw = Callable[[int, Generator], Any]


class Healthy(NamedTuple):
    """A model, its samples and its loss."""

    build: Callable[[], nn.Module]
    draw: Draw
    loss: Callable[[Any, Any], Any]


# ---- samples -------------------------------------------------------------------------------------


def images(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Waves [N, 3, SIDE, SIDE] whose direction is the class."""
    kinds = torch.randint(CLASSES, (samples,), generator=generator)
    angle = (kinds * (torch.pi / CLASSES))[:, None, None, None]
    rows = torch.arange(SIDE)[:, None]
    waves = torch.sin(0.8 * (angle.sin() * rows + angle.cos() * rows.T))
    return waves + 0.3 * torch.randn(samples, 3, SIDE, SIDE, generator=generator), kinds


def sequences(samples: int, generator: Generator) -> Tensor:
    """Sequences [N, LENGTH] that count up by a step of their own; 0 does not occur."""
    start = torch.randint(TOKENS - 1, (samples, 1), generator=generator)
    step = torch.randint(1, 4, (samples, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % (TOKENS - 1) + 1


def texts(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Tokens, and their step as the class."""
    tokens = sequences(samples, generator)
    return {"input_ids": tokens, "labels": (tokens[:, 1] - tokens[:, 0]) % 3}


def padded_texts(samples: int, generator: Generator) -> dict[str, Tensor]:
    """The same with padding on the right."""
    drawn = texts(samples, generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=generator)
    kept = (torch.arange(LENGTH) < lengths).long()
    return drawn | {"input_ids": drawn["input_ids"] * kept, "attention_mask": kept}


def windows(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    tokens = sequences(samples, generator)
    return {"input_ids": tokens, "labels": tokens}


def pictures(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Images under the names of transformers."""
    pixels, kinds = images(samples, generator)
    return {"pixel_values": pixels, "labels": kinds}


def waves(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Signals [N, LENGTH, 4] and the class of their frequency."""
    kinds = torch.randint(CLASSES, (samples,), generator=generator)
    phase = torch.rand(samples, 1, 4, generator=generator)
    rate = 0.3 + 0.5 * kinds[:, None, None]
    return 2 * torch.sin(rate * torch.arange(LENGTH)[:, None] + phase), kinds


def alone(draw: Draw, samples: int, generator: Generator) -> tuple[Tensor]:
    """Inputs without a class."""
    return (draw(samples, generator)[0],)


def masks(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Images and where they are bright."""
    pixels = images(samples, generator)[0]
    return pixels, (pixels.mean(1, keepdim=True) > 0).float()


def pairs(samples: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two signals and whether they are of one class."""
    one, kinds = waves(samples, generator)
    two, others = waves(samples, generator)
    return one, two, (kinds == others).float()


def rows(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Columns of unlike scales, and a number."""
    x = torch.randn(samples, 8, generator=generator)
    target = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    return x * torch.tensor([1, 1, 1, 1, 10, 10, 0.1, 0.1]), target


def reversals(samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Sequences, and the same backwards."""
    tokens = sequences(samples, generator)
    return tokens, tokens.flip(1)


# ---- losses --------------------------------------------------------------------------------------


def classes(output: Tensor, batch: Any) -> Tensor:
    """Of logits [B, CLASSES]."""
    return F.cross_entropy(output, batch[1])


def own_loss(output: Any, batch: Any) -> Any:
    """The one that the output brings."""
    return output["loss"]


def of_tokens(output: Tensor, batch: Any) -> Tensor:
    """Of logits [B, L, TOKENS]."""
    return F.cross_entropy(output.flatten(0, 1), batch[-1].flatten())


def reconstruction(output: Tensor, batch: Any) -> Tensor:
    """Of the inputs."""
    return F.mse_loss(output, batch[0])


# ---- models of public examples -------------------------------------------------------------------


class LstmClassifier(nn.Module):
    """PyTorch's LSTM and a layer on the mean of its hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 32, batch_first=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.lstm(x)[0].mean(1))
        return logits


class Vae(nn.Module):
    """pytorch/examples/vae, smaller: two layers each way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log_variance = (
            nn.Linear(4 * LENGTH, 64),
            nn.Linear(64, 8),
            nn.Linear(64, 8),
        )
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 4 * LENGTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reconstruction, mean and log-variance."""
        hidden = F.relu(self.fc1(x.flatten(1)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.fc4(F.relu(self.fc3(drawn))).view_as(x), mean, log_variance


def bound(output: tuple[Tensor, Tensor, Tensor], batch: tuple[Tensor]) -> Tensor:
    """The negative evidence lower bound."""
    reconstructed, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return F.mse_loss(reconstructed, batch[0]) + 1e-3 * divergence


class Generator16(nn.Module):
    """DCGAN's generator for 16 x 16 images, judged by a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.generate = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.judge = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 16, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(256, 1),
        ).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        """How real the images look [B, 1], as logits."""
        logits: Tensor = self.judge(self.generate(noise[:, :, None, None]))
        return logits


def noise(samples: int, generator: Generator) -> tuple[Tensor]:
    """What images are made of [N, 16]."""
    return (torch.randn(samples, 16, generator=generator),)


def looks_real(output: Tensor, batch: Any) -> Tensor:
    """The generator's loss: Goodfellow et al., 2014, not saturating."""
    return F.binary_cross_entropy_with_logits(output, torch.ones_like(output))


class Unet(nn.Module):
    """Two levels: Ronneberger et al., 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._twice(3, 8), self._twice(8, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), self._twice(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    @staticmethod
    def _twice(channels: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A logit for each pixel."""
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        logits: Tensor = self.head(self.last(torch.cat([fine, self.up(coarse)], dim=1)))
        return logits


def pixels_and_dice(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Cross-entropy of pixels and the Dice loss."""
    likely, mask = output.sigmoid(), batch[1]
    overlap = (likely * mask).sum((1, 2, 3))
    total = likely.sum((1, 2, 3)) + mask.sum((1, 2, 3))
    return {
        "pixels": F.binary_cross_entropy_with_logits(output, mask),
        "dice": (1 - (2 * overlap + 1) / (total + 1)).mean(),
    }


class Siamese(nn.Module):
    """One encoder for two signals; their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Flatten(), nn.Linear(4 * LENGTH, 64), nn.ReLU(), nn.Linear(64, 16))
        )

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """Distances [B]."""
        return F.pairwise_distance(self.encoder(one), self.encoder(two))


def contrastive(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Hadsell, Chopra and LeCun, 2006."""
    same = batch[2]
    return (same * output.square() + (1 - same) * F.relu(1 - output).square()).mean()


class Seq2Seq(nn.Module):
    """A GRU each way and attention between them: PyTorch's tutorial of translation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.encoder = nn.GRU(32, 32, batch_first=True)
        self.decoder = nn.GRUCell(64, 32)
        self.query, self.head = nn.Linear(32, 32), nn.Linear(32, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, L, TOKENS], each from what was read and the step before."""
        memory, last = self.encoder(self.embedding(tokens))
        hidden, logits = last[0], []
        for _ in range(tokens.shape[1]):
            scores = (memory @ self.query(hidden)[:, :, None]).squeeze(-1) / math.sqrt(32)
            seen = (scores.softmax(-1)[:, None] @ memory).squeeze(1)
            hidden = self.decoder(torch.cat([seen, hidden.to(seen.dtype)], dim=-1), hidden)
            logits.append(self.head(hidden))
        return torch.stack(logits, dim=1)


def autoencoder() -> nn.Module:
    """Strided convolutions down and up."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2)),
    )


def perceptron() -> nn.Module:
    """For rows of numbers."""
    return nn.Sequential(
        *(nn.BatchNorm1d(8), nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)),
    )


def squared_error(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of numbers."""
    return F.mse_loss(output, batch[1])


def encoder_layers() -> nn.Module:
    """PyTorch's own transformer layers, behind an embedding."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(TOKENS, 32), encoder, nn.Linear(32, TOKENS))


EXAMPLES = {
    "lstm_classifier": Healthy(LstmClassifier, waves, classes),
    "autoencoder": Healthy(autoencoder, partial(alone, images), reconstruction),
    "vae": Healthy(Vae, partial(alone, waves), bound),
    "gan_generator": Healthy(Generator16, noise, looks_real),
    "unet": Healthy(Unet, masks, pixels_and_dice),
    "siamese": Healthy(Siamese, pairs, contrastive),
    "seq2seq": Healthy(Seq2Seq, reversals, of_tokens),
    "perceptron": Healthy(perceptron, rows, squared_error),
    "encoder_layers": Healthy(encoder_layers, reversals, of_tokens),
}

# ---- torchvision ---------------------------------------------------------------------------------


def small_densenet() -> nn.Module:
    """Four blocks of two layers."""
    model: nn.Module = torchvision.models.DenseNet(8, (2, 2, 2, 2), 16, num_classes=CLASSES)
    return model


def small_convnext() -> nn.Module:
    """Two stages, with layer scale and stochastic depth."""
    stages = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    model: nn.Module = torchvision.models.ConvNeXt(stages, 0.1, 1e-2, num_classes=CLASSES)
    return model


def small_vit() -> nn.Module:
    """Two layers on patches of 8 x 8."""
    model: nn.Module = torchvision.models.VisionTransformer(
        SIDE, 8, 2, 4, 32, 64, num_classes=CLASSES
    )
    return model


def small_swin() -> nn.Module:
    """Two stages of windows of 4 x 4."""
    model: nn.Module = torchvision.models.SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES
    )
    return model


def named_vision(name: str) -> nn.Module:
    """A model of torchvision at its own size."""
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    return model


NAMED = (
    *("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"),
    # they learn slowly on 32 x 32 pixels in batches of 8: a check must not take that for a fault
    *("mobilenet_v2", "mnasnet0_5", "efficientnet_b0", "regnet_y_400mf"),
)
VISION = {name: Healthy(partial(named_vision, name), images, classes) for name in NAMED} | {
    "densenet": Healthy(small_densenet, images, classes),
    "convnext": Healthy(small_convnext, images, classes),
    "vit": Healthy(small_vit, images, classes),
    "swin": Healthy(small_swin, images, classes),
}

# ---- transformers --------------------------------------------------------------------------------

SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LAYERS = {"num_key_value_heads": 2}
OF_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], Draw]] = {
    "bert": ("SequenceClassification", {}, padded_texts),
    "roberta": ("SequenceClassification", {}, texts),
    "distilbert": (
        "SequenceClassification",
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
        padded_texts,
    ),
    "gpt2": ("CausalLM", {"n_inner": 64}, windows),
    "llama": ("CausalLM", LAYERS, windows),
    "mistral": ("CausalLM", LAYERS, windows),
    "qwen2": ("CausalLM", LAYERS, windows),
    "mamba": ("CausalLM", {"state_size": 8}, windows),
    "t5": ("Seq2SeqLM", OF_T5 | {"decoder_start_token_id": 0}, windows),
}
OF_VIT = {"image_size": SIDE, "patch_size": 8}


def named_transformer(name: str) -> nn.Module:
    """A model of transformers of a small configuration.

    Raises:
        UsageError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise UsageError(f"name={name} needs transformers: pip install transformers")
    import transformers

    kind, more, _ = TRANSFORMERS.get(name, ("ImageClassification", OF_VIT, pictures))
    config = transformers.AutoConfig.for_model(
        name.removesuffix("_of_transformers"), **(SIZES | more), num_labels=CLASSES
    )
    model: nn.Module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    return model


OF_TRANSFORMERS = {
    name: Healthy(partial(named_transformer, name), draw, own_loss)
    for name, (_, _, draw) in TRANSFORMERS.items()
}
OF_TRANSFORMERS["vit_of_transformers"] = Healthy(
    partial(named_transformer, "vit_of_transformers"), pictures, own_loss
)

MODELS = EXAMPLES | VISION | OF_TRANSFORMERS


@dataclass(frozen=True)
class HealthyModel(Recipe):
    """One of `MODELS`."""

    name: str = "perceptron"
    """Its name."""

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")
    draws_data: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset({"data.source", "data.root", "data.fallback"})

    def __post_init__(self) -> None:
        if self.name not in MODELS:
            raise ValueError(f"name={self.name}: legal is {', '.join(MODELS)}")

    def model(self) -> nn.Module:
        return MODELS[self.name].build()

    def data(self, request: DataRequest) -> Splits:
        train = TensorSet(MODELS[self.name].draw(SAMPLES, torch.Generator().manual_seed(0)))
        none = train.first(0)
        return Splits(self.name, "generated", train.first(request.train_limit), none, none)

    def sample(self) -> TensorSet:
        return TensorSet(MODELS[self.name].draw(1, torch.Generator().manual_seed(0)))

    def loss(self, output: Any, batch: Any) -> Any:
        return MODELS[self.name].loss(output, batch)
