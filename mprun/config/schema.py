"""The schema of a configuration: every field's name, type, default and meaning.

The string below a field is its documentation; `mprun --help` and the page of fields are made
from it (`reference.py`). Fields that a group sets (recipe, precision, ...) are `MISSING` here and
have their value in `conf/`; all others have their default here. Users type the member names of the
enums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta
from omegaconf import II, MISSING

from mprun.config.ranges import Count, NotNegative, Positive, Share
from mprun.records.mode_names import FORMAT_MODES


class DType(Enum):
    """A floating dtype by PyTorch's name."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class MomentDType(Enum):
    """Dtype of a moment of the optimizer; uint8: codes of 8 bits, with a scale for 256 numbers."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    uint8 = "uint8"


Gemms = Enum("Gemms", [(x, x) for x in ("none", *FORMAT_MODES)])  # type: ignore[misc]
"""Formats of matrix products, by the mode that has them."""


class Casting(Enum):
    """How an op's dtype is decided: not at all, by PyTorch's autocast, or by op lists."""

    none = "none"
    autocast = "autocast"
    op_lists = "op_lists"


class Unlisted(Enum):
    """The dtype of an op on no list: that of its first input, or PyTorch's own promotion."""

    first_input = "first_input"
    as_it_is = "as_it_is"


class Rounding(Enum):
    """How a result is rounded to a narrower dtype; kahan and split keep what nearest cuts off."""

    nearest = "nearest"
    stochastic = "stochastic"
    kahan = "kahan"
    split = "split"


class RoundingScope(Enum):
    """Which results are rounded by `rounding`: parameter and state updates, or all."""

    update = "update"
    all = "all"


class Overflow(Enum):
    """The result of rounding a finite number beyond a dtype's largest."""

    infinity = "infinity"
    saturate = "saturate"


DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu")
"""The kinds that `mprun.devices` knows."""


class Execution(Enum):
    """PyTorch's kernels, or mprun's rounding around float32 arithmetic."""

    auto = "auto"
    native = "native"
    emulated = "emulated"


class DataSource(Enum):
    """Where samples come from."""

    auto = "auto"
    real = "real"
    generated = "generated"


class DataFallback(Enum):
    """What `data.source=auto` uses if there is neither a local file nor a download."""

    none = "none"
    generated = "generated"


class OptimizerName(Enum):
    """The optimizers a recipe can name."""

    sgd = "sgd"
    rmsprop = "rmsprop"
    adamw = "adamw"


class LossScaleKind(Enum):
    """How the loss is scaled; `auto` takes the kind that the mode needs."""

    auto = "auto"
    none = "none"
    static = "static"
    dynamic = "dynamic"


class FpExceptions(Enum):
    """The action after an op that produces a number that is not finite."""

    off = "off"
    log = "log"
    halt = "halt"
    skip = "skip"


class Guard(Enum):
    """The action on a product that does not tolerate its format of 8 bits or fewer."""

    off = "off"
    log = "log"
    promote = "promote"


class LoggerMode(Enum):
    """Whether a logger sends its data away; `offline` never does."""

    offline = "offline"
    online = "online"


class Scheduler(Enum):
    """Learning-rate schedule over the planned optimizer steps."""

    none = "none"
    linear = "linear"
    cosine = "cosine"


class LrRule(Enum):
    """How the learning rate grows with a batch that `batch.factor` multiplies."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


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


@dataclass
class PrecisionConfig:
    """A precision mode: one row of the policy table."""

    name: str = MISSING
    """The mode's name in records and tables."""
    param_dtype: DType = MISSING
    """Dtype the parameters are stored in (Keras: variable dtype)."""
    compute_dtype: DType = MISSING
    """Dtype matmuls and convolutions compute in."""
    output_dtype: DType = MISSING
    """Dtype the model's outputs are cast to before the loss."""
    casting: Casting = MISSING
    """How ops get their dtype: none (parameters' own), autocast or op_lists."""
    rounding: Rounding = MISSING
    """Of 16-bit parameters and state: nearest, stochastic, kahan (2 bytes more), split (1 more)."""
    rounding_scope: RoundingScope = MISSING
    """Where this rounding is used: update, for parameters and state; all, for every result."""
    overflow: Overflow = Overflow.infinity
    """Finite numbers beyond a dtype's largest become infinity, or saturate at the largest."""
    accum_dtype: DType = MISSING
    """Dtype gradients are accumulated and stored in (PopTorch: accum_type)."""
    momentum_dtype: MomentDType = MISSING
    """Dtype of the optimizer's first moment; uint8: 8-bit codes (of 4096 numbers or more)."""
    variance_dtype: MomentDType = MISSING
    """Dtype of the optimizer's second moment; in 16 or 8 bits its square root is stored."""
    reduce_dtype: DType = DType.float32
    """Dtype gradients are sent in and summed in over processes (see `parallel`)."""
    partials_dtype: DType = MISSING
    """Dtype matmul and convolution accumulate in: float32, or float16 in float16 modes."""
    tf32: bool = MISSING
    """Whether float32 matmuls and convolutions use TensorFloat-32."""
    gemms: Gemms = Gemms["none"]
    """Format of the products of inner linear layers; none: the compute dtype."""
    hadamard: bool = False
    """In modes with such formats: a random Hadamard transform before gradients of weights."""
    layers: dict[Any, Any] = field(default_factory=dict)
    """Modules with a dtype, mode or formats of their own: {fc2: fp32, enc.*: {forward: fp8}}."""
    layers_file: str | None = None
    """A YAML file with such a mapping; precision.layers adds to it and wins."""


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
    unlisted: Unlisted = Unlisted.first_input
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

    name: LossScaleKind = MISSING
    """The kind of loss scale: auto, none, static or dynamic."""
    value: Positive | None = None
    """The static factor, or the initial dynamic one; null for 1024 and 65536."""
    growth_factor: Annotated[float, Meta(gt=1)] = 2.0
    """A dynamic scale is multiplied by this after growth_interval steps without overflow."""
    backoff_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """A dynamic scale is multiplied by this at an overflow."""
    growth_interval: Count = 2000
    """Steps without overflow after which a dynamic scale grows."""
    floor: NotNegative = 2.0**-14
    """A dynamic scale that falls to this ends the run."""


@dataclass
class BatchConfig:
    """The batch size; half-size tensors leave room for a larger one."""

    factor: Annotated[int, Meta(ge=1, le=1024)] = MISSING
    """The base batch, train.batch_size, is multiplied by this."""
    lr_rule: LrRule = MISSING
    """Learning rate for the multiplied batch: none, linear (x factor) or sqrt (x its root)."""


@dataclass
class SpeedConfig:
    """How a step is made fast, with equal results up to the order of additions."""

    name: str = MISSING
    """The name of the option: auto chooses what is fastest here, plain is the simple loop."""
    compile: bool | str = "auto"
    """Compile the model with `torch.compile`: true, false, or auto: where it was seen to pay."""


@dataclass
class LoggerConfig:
    """A further output beside the record, which is always written."""

    name: str = MISSING
    """The name of the logger."""
    project: str | None = None
    """MLflow's experiment, or the project of W&B and trackio; null: the recipe's name."""
    run_name: str | None = None
    """The run's name there; null: variant and seed."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags beside mprun's own (precision, variant, seed, hardware, ...): {team: vision}."""
    uri: str | None = None
    """MLflow's store, sqlite:///FILE or https://SERVER; null: mlflow.db beside the runs."""
    mode: LoggerMode = LoggerMode.offline
    """W&B: offline keeps all in files for `wandb sync`; online sends it while the run trains."""


class ParallelKind(Enum):
    """How several processes train one model."""

    none = "none"
    ddp = "ddp"
    fsdp2 = "fsdp2"


@dataclass
class ParallelConfig:
    """Training in several processes, which torchrun starts."""

    name: ParallelKind = MISSING
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


@dataclass
class OptimizerConfig:
    """The optimizer and its own parameters; the learning rate is train.lr."""

    name: OptimizerName = OptimizerName.adamw
    """Which optimizer."""
    target: str | None = None
    """Import path of another one (torch.optim.Adagrad); null: the one that is named."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of target, but not lr: {lr_decay: 0.1}."""
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
    scheduler: Scheduler = Scheduler.none
    """Learning-rate schedule after the warm-up: none, linear or cosine, both down to min_lr."""
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Optimizer steps in which the learning rate grows linearly from near 0 to train.lr."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    checkpoint_every_steps: Count | None = None
    """Write a checkpoint every n steps; one is always written at the end and on a signal."""
    log_every: Count = 1
    """Write every n-th step to metrics.jsonl (all steps enter the statistics)."""
    init_from: str | None = None
    """Start from weights: a run's folder, checkpoint, state_dict or safetensors; null: drawn."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""


@dataclass
class DataConfig:
    """The data."""

    source: DataSource = DataSource.auto
    """auto or real: local files, else a download; generated: drawn by mprun, no network."""
    root: str | None = None
    """Folder of the data sets in torchvision's layout; else MPRUN_DATA, else the cache folder."""
    fallback: DataFallback = DataFallback.none
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
    """Debugging; only skip and promote change a run's results, from what they find on."""

    fp_exceptions: FpExceptions = FpExceptions.off
    """Report the op that first makes a NaN or an infinity: off, log, halt, skip (drop the step)."""
    halt_after: Count = 20
    """halt and skip end the run after this many lost steps (skipped or dropped) in a row."""
    guard: Guard = Guard.off
    """Products that do not tolerate their 8- or 4-bit format: off, log, promote (to bfloat16)."""
    guard_underflow: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of a factor's numbers that may become 0; null: 0.05 in 8 bits, 0.9 in 4."""
    guard_error: NotNegative | None = None
    """Share of a factor's squares that may be lost; null: 1e-4 in 8 bits, 0.2 in 4."""


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
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
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
    execution: Execution = Execution.auto
    """auto, native or emulated."""
