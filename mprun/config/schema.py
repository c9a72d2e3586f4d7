"""The schema of a configuration: every field's name, type, default and meaning.

The string below a field is its documentation; `mprun --help` and the page of fields are made
from it (`reference.py`). Fields that a group sets (recipe, precision, ...) are `MISSING` here and
have their value in `conf/`; all others have their default here. Types have the ranges of numbers
and the legal texts; OmegaConf, which reads the types too, takes `int` and `str` alone.
"""

from __future__ import annotations

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from msgspec import Meta
from omegaconf import II, MISSING

from mprun.records.policy_columns import Count, Legal, NotNegative, PolicyColumns, Positive, Share

DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu")
"""The kinds that `mprun.precision.devices` knows."""


@dataclass
class RecipeConfig:
    """Model, data, loss and metric."""

    name: str = MISSING
    """The recipe's name in records and tables."""
    target: str = MISSING
    """Import path of the recipe's class, or its name in recipe.file. Loading it runs its code."""
    file: str | None = None
    """The recipe's Python file, set by recipe=path/to/my.py; null for a recipe by name."""
    model: dict[str, Any] = field(default_factory=dict)
    """The recipe's own parameters, typed by its class (for example recipe.model.units=64)."""


@dataclass(kw_only=True)
class PrecisionConfig(PolicyColumns):
    """A precision mode: one row of the policy table."""

    name: str
    """The mode's name in records and tables."""
    # Any: `0`, the name of a module, is a number in YAML, and a value may be a mapping
    layers: dict[Any, Any] = field(default_factory=dict)
    """Modules with a dtype, mode or formats of their own: {fc2: fp32, enc.*: {forward: fp8}}."""
    layers_file: str | None = None
    """A YAML file with such a mapping; precision.layers adds to it and wins."""

    @classmethod
    def missing(cls) -> PrecisionConfig:
        """A row whose columns without default are to be set by a mode."""
        columns = (x.name for x in fields(cls) if x.default is x.default_factory is NO_DEFAULT)
        return cls(**dict.fromkeys(columns, MISSING))


@dataclass
class OpListsConfig:
    """Which ops are cast by name."""

    name: str = MISSING
    """The name of the lists."""
    lower: list[str] = field(default_factory=list)
    """Ops that compute in the mode's 16-bit dtype."""
    fp32: list[str] = field(default_factory=list)
    """Ops that compute in float32."""
    promote: list[str] = field(default_factory=list)
    """Ops that compute in the widest dtype among their inputs."""
    cuda_lower: list[str] | None = None
    """The first list on CUDA, where it differs."""
    cuda_fp32: list[str] | None = None
    """The second list on CUDA, where it differs."""
    cuda_promote: list[str] | None = None
    """The third list on CUDA, where it differs."""
    unlisted: Annotated[str, Legal("first_input", "as_it_is")] = "first_input"
    """Ops on no list: first_input (cast to its dtype) or as_it_is (PyTorch's own promotion)."""
    lower_file: str | None = None
    """A file that replaces the first list: one op per line, or YAML."""
    fp32_file: str | None = None
    """A file that replaces the second list."""
    promote_file: str | None = None
    """A file that replaces the third list."""
    strict: bool = False
    """Whether a name no op has is an error instead of a warning."""
    verbose: bool = False
    """Log each distinct cast once."""


@dataclass
class LossScaleConfig:
    """Loss scaling."""

    name: Annotated[str, Legal("auto", "none", "static", "dynamic")] = MISSING
    """The kind of loss scale: auto, none, static or dynamic."""
    value: Positive | None = None
    """The static factor, or the initial dynamic one; null for 1024 and 65536."""
    # growth_factor, backoff_factor and growth_interval are the defaults of torch.amp.GradScaler
    growth_factor: Annotated[float, Meta(gt=1)] = 2.0
    """A dynamic scale is multiplied by this after growth_interval steps without overflow."""
    backoff_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """A dynamic scale is multiplied by this at an overflow."""
    growth_interval: Count = 2000
    """Steps without overflow after which a dynamic scale grows."""
    floor: NotNegative = 2.0**-14  # The smallest normal float16
    """A dynamic scale that falls to this ends the run."""


@dataclass
class BatchConfig:
    """The batch size; half-size tensors leave room for a larger one."""

    factor: Annotated[int, Meta(ge=1, le=1024)] = MISSING
    """The base batch, train.batch_size, is multiplied by this."""
    lr_rule: Annotated[str, Legal("none", "linear", "sqrt")] = MISSING
    """Learning rate for the multiplied batch: none, linear (x factor) or sqrt (x its root)."""


@dataclass
class SpeedConfig:
    """How a step is made fast, with equal results up to the order of additions."""

    name: str = MISSING
    """The name of the option: auto chooses what is fastest here, plain is the simple loop."""
    compile: bool | str = "auto"
    """Compile the model with `torch.compile`: true, false, or auto: where it was seen to pay."""
    optimizer_in_backward: bool = False
    """Update parameters in the backward pass and free their gradients: less memory, equal bits."""


@dataclass
class LoggerConfig:
    """A further output beside the record, which is always written."""

    name: str = MISSING
    """The name of the logger."""
    project: str | None = None
    """The project there, in MLflow the experiment; null: the recipe's name."""
    run_name: str | None = None
    """The run's name there; null: variant and seed."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags beside mprun's own (precision, variant, seed, hardware, ...): {team: vision}."""
    uri: str | None = None
    """MLflow's store, sqlite:///FILE or https://SERVER; null: mlflow.db beside the runs."""
    mode: Annotated[str, Legal("offline", "online")] = "offline"
    """W&B: offline keeps all in files for `wandb sync`; online sends it while the run trains."""


@dataclass
class ParallelConfig:
    """Training in several processes, which torchrun starts."""

    name: Annotated[str, Legal("none", "ddp", "fsdp2")] = MISSING
    """none; ddp: each process holds the whole model; fsdp2: each holds a shard of it."""
    world_size: Count = 1
    """How many processes train; torchrun decides it."""


@dataclass
class PresetConfig:
    """A named bundle of overrides."""

    name: str = MISSING
    """The name of the preset."""
    max_batch_size: Count | None = None
    """Cap on train.batch_size that the preset sets."""
    loss_must_fall: bool = False
    """Fail the run unless the mean loss of its last third is below that of its first third."""


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer that has a name."""

    kind: str
    """The class of `torch.optim`."""
    arguments: tuple[str, ...]
    """Of the class: fields of `OptimizerConfig`, or betas."""
    moments: tuple[str, ...]
    """Of the class of this name in `mprun.optim`, in the mode's dtypes. A moment with a field is
    stored where that is not 0."""


MOMENTS = ("momentum", "variance")
BETAS = {"betas": ("beta1", "beta2")}
OPTIMIZERS = {
    "sgd": OptimizerRow("SGD", ("weight_decay", "momentum"), ("momentum",)),
    "rmsprop": OptimizerRow("RMSprop", ("weight_decay", "momentum", "alpha", "eps"), MOMENTS),
    "adamw": OptimizerRow("AdamW", ("weight_decay", "betas", "eps"), MOMENTS),
}
"""Every name that train.optimizer.name can be."""


@dataclass
class OptimizerConfig:
    """The optimizer and its own parameters; the learning rate is train.lr."""

    name: Annotated[str, Legal(*OPTIMIZERS)] = "adamw"
    """Which optimizer."""
    # these defaults are those of torch.optim, except AdamW's weight decay of 0.01
    momentum: NotNegative = 0.0
    """Momentum of SGD and RMSprop."""
    weight_decay: NotNegative = 0.0
    """Weight decay (decoupled in AdamW, L2 in SGD and RMSprop)."""
    alpha: NotNegative = 0.99
    """RMSprop's smoothing constant (Keras calls it rho)."""
    beta1: Share = 0.9
    """AdamW's decay of the first moment."""
    beta2: Share = 0.999
    """AdamW's decay of the second moment."""
    eps: NotNegative = 1e-8
    """Term added to the denominator of RMSprop and AdamW."""

    @property
    def stored_moments(self) -> set[str]:
        """Which of "momentum" and "variance" are stored, in the mode's dtypes."""
        row = OPTIMIZERS[self.name]
        return {x for x in row.moments if x not in row.arguments or getattr(self, x)}


@dataclass
class TrainConfig:
    """The loop."""

    epochs: Count | None = None
    """Passes over the training data; null for no limit."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps; null for no limit."""
    max_time_s: Positive | None = None
    """Seconds for the run from its start-up to its last score; null for no limit."""
    batch_size: Count = 32
    """Samples per micro-batch, before batch.factor; the base that batch=double doubles."""
    eval_batch_size: Count = field(default=II("train.batch_size"))
    """Samples per batch in validation and test; by default as in training."""
    lr: Positive = 1e-3
    """Learning rate."""
    clip_norm: Positive | None = None
    """Clip the gradients' global L2 norm to this; null for no clipping."""
    accumulate: Count = 1
    """Micro-batches whose gradients are accumulated into one optimizer step."""
    scheduler: Annotated[str, Legal("none", "linear", "cosine")] = "none"
    """Learning-rate schedule after the warm-up: none, linear or cosine, both down to min_lr."""
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Optimizer steps in which the learning rate grows linearly from near 0 to train.lr."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    checkpoint_every_steps: Count | None = None
    """Write a checkpoint every n steps; one is always written at the end and on a signal."""
    validations: Count | None = None
    """Also validate after each of this many equal parts of the planned steps; null: do not."""
    average_weights: Annotated[int, Meta(ge=0, le=100)] = 0
    """Also score the mean of the weights at so many places of the last tenth of the steps."""
    log_every: Count = 1
    """Write every n-th step to metrics.jsonl (all steps enter the statistics)."""
    init_from: str | None = None
    """Start from weights: a run's folder, checkpoint, state_dict or safetensors; null: drawn."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""


@dataclass
class DataConfig:
    """The data."""

    source: Annotated[str, Legal("auto", "real", "generated")] = "auto"
    """auto or real: local files, else a download; generated: drawn by mprun, no network."""
    root: str | None = None
    """Folder of the data sets in torchvision's layout; else MPRUN_DATA, else the cache folder."""
    fallback: Annotated[str, Legal("none", "generated")] = "none"
    """generated: use the generated set if there are neither files nor a download."""
    validation_fraction: Share = 0.0
    """Share of the training set, its last part, held out for validation."""
    train_limit: Count | None = None
    """Use only the first n training samples; null for all."""
    eval_limit: Count | None = None
    """Use only the first n validation and n test samples; null for all."""
    test: bool = True
    """Whether the test set is used, once, at the end; false in a study that selects something."""
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Processes that read samples of a recipe's data set; a recipe's DataLoader has its own."""


@dataclass
class DebugConfig:
    """Debugging; only skip changes a run's results, from what it finds on."""

    fp_exceptions: Annotated[str, Legal("off", "log", "halt", "skip")] = "off"
    """Report the op that first makes a NaN or an infinity: off, log, halt, skip (drop the step)."""
    halt_after: Count = 20
    """halt and skip end the run after this many lost steps (skipped or dropped) in a row."""


@dataclass
class RunConfig:
    """Where a run writes its record."""

    dir: str | None = None
    """The run's folder, without an earlier run; default outputs/<date>/<time>."""
    resume: str | None = None
    """Resume the run in this folder from its last checkpoint, with its own configuration."""
    trust: bool = False
    """Also run recipe code that lies in the folder that is resumed: only for folders you trust."""


@dataclass
class Config:
    """Everything a run depends on."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    """What is trained."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig.missing)
    """The numerical precision."""
    op_lists: OpListsConfig = field(default_factory=OpListsConfig)
    """Ops cast by name."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scaling."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Batch size against the recipe's."""
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    """How a step is made fast."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several processes."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """A further output."""
    preset: PresetConfig = field(default_factory=PresetConfig)
    """Bundles of overrides."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """Debugging."""
    run: RunConfig = field(default_factory=RunConfig)
    """The record."""
    # PyTorch's CPU generator uses 32 bits of a seed: a larger one would repeat another's run.
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights and of the order of samples; the same in every mode."""
    device: str = "auto"
    """auto (the accelerator if there is one), cpu, cuda, xpu, mps, hpu; one of several: cuda:1."""
    execution: Annotated[str, Legal("auto", "native", "emulated")] = "auto"
    """auto, native or emulated."""
