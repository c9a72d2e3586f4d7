"""The snippet for FSDP2: `fully_shard` with a `MixedPrecisionPolicy`.

FSDP2 has no lists of ops: `param_dtype` alone would compute everything in 16 bits, norms and
softmax too. So the snippet keeps autocast, and `param_dtype` only decides in which dtype weights
are gathered. That rounds weights which autocast leaves in float32 (those of norms): the file says
so. Where mprun decides each op or stores 16 bits, weights are gathered as they are stored.

Parameters in 16 bits are updated by mprun's optimizers on each process's own shard.
"""

from __future__ import annotations

from mprun.report.snippet_parts import SnippetParts, indented, torch_name

POLICY_IMPORT = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
MESH_IMPORT = "from torch.distributed.device_mesh import init_device_mesh"


def fsdp2_lines(parts: SnippetParts) -> list[str]:
    """The file's lines."""
    imports = parts.imports("import torch.distributed as dist", MESH_IMPORT, POLICY_IMPORT)
    body = [
        *parts.set_up(),
        "mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))",
        *_own_layers(parts),
        *_policy(parts),
        "fully_shard(model, mesh=mesh, mp_policy=mp_policy)",
        *_optimizer(parts),
        *[f"scaler = {parts.scaler()}"] * parts.scales,
    ]
    step = [
        "x, y = x.to(DEVICE), y.to(DEVICE)",
        "model.zero_grad()",
        *parts.forward("model", "x"),
        "loss = loss_fn(output, y)",
        *_step(parts),
    ]
    head = parts.head("FSDP2", imports, _notes(parts))
    return [
        *head,
        f"def train(model, loss_fn, batches, lr={parts.answer.lr!r}):",
        '    """One step for each (input, target) of this process\'s `batches`; the sharded model.',
        "",
        "    Call it in each process of torchrun, after torch.distributed.init_process_group().",
        '    """',
        *indented([*body, "for x, y in batches:", *indented(step), "return model"]),
    ]


def _notes(parts: SnippetParts) -> list[str]:
    notes = parts.clip_note()
    if parts.autocast:
        short = parts.compute.removeprefix("torch.")
        notes += [
            f"differs: weights are gathered in {short}, also those that autocast leaves in "
            "float32 (of norms); param_dtype=None gathers float32, as measured"
        ]
    if parts.answer.columns["accum_dtype"] != parts.answer.columns["param_dtype"]:
        notes += ["no equivalent: float32 gradients of 16-bit parameters; FSDP2 stores 16 bits"]
    if parts.answer.layers:
        notes += ["LAYERS that are globs have to be written out: each module is sharded by itself"]
    return notes


def _policy(parts: SnippetParts) -> list[str]:
    stored = parts.answer.columns["param_dtype"]
    if not parts.by_mprun and not parts.autocast:
        return ["mp_policy = MixedPrecisionPolicy()  # float32 everywhere"]
    param = parts.compute if parts.autocast else "None"
    casts = False
    if stored != "float32":
        param, casts = torch_name(stored), True
    return [
        "mp_policy = MixedPrecisionPolicy(",
        f"    param_dtype={param},",
        "    reduce_dtype=torch.float32,",
        "    output_dtype=torch.float32,",
        f"    cast_forward_inputs={casts},",
        ")",
    ]


def _own_layers(parts: SnippetParts) -> list[str]:
    """A layer in another precision is sharded with its own policy."""
    if not parts.answer.layers:
        return []
    return [
        "as_stored = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)",
        "for name in LAYERS:",
        "    fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=as_stored)",
    ]


def _optimizer(parts: SnippetParts) -> list[str]:
    if not parts.rounds:
        return [f"optimizer = {parts.optimizer()}"]
    making = parts.optimizer("[shard for _, shard in shards]", ", seed=dist.get_rank()")
    return [
        "trained = [p for p in model.parameters() if p.requires_grad]",
        "shards = [(p, torch.nn.Parameter(p.to_local().detach())) for p in trained]",
        f"optimizer = {making}",
    ]


def _step(parts: SnippetParts) -> list[str]:
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {parts.answer.clip_norm})"
    clips = [clip] * parts.clips
    local = [
        "for p, shard in shards:",
        "    shard.grad = None if p.grad is None else p.grad.to_local()",
    ] * parts.rounds
    if not parts.scales:
        return ["loss.backward()", *clips, *local, "optimizer.step()"]
    agreed = [
        "# All processes skip a step that overflows in one of them.",
        "gradients = [shard.grad for _, shard in shards if shard.grad is not None]",
        "finite = torch.stack([g.isfinite().all() for g in gradients]).all().float()",
        "dist.all_reduce(finite, dist.ReduceOp.MIN)",
        "if not finite:",
        "    for g in gradients:",
        '        g.fill_(float("inf"))',
    ] * parts.rounds
    unscaled = ["scaler.unscale_(optimizer)", *clips] if parts.clips else []
    return [
        *("scaler.scale(loss).backward()", *unscaled, *local, *agreed),
        *("scaler.step(optimizer)", "scaler.update()"),
    ]
