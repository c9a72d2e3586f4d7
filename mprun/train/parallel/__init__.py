"""Several processes that train one model: what they exchange, and what each of them holds.

torchrun starts the processes; torch.distributed connects them (gloo on CPUs, NCCL on GPUs). The
global batch of a step is cut into one part per process. Each process computes the gradients of its
part, and gradients are summed. So a run of N processes takes the steps of one process with the same
global batch.

    coordinator  how the processes of a command meet, get their jobs, and learn that one is lost
    ranks        numbers and objects that the processes exchange; a no-op for one process
    layouts      what a process holds of the model: all of it, in one process or in each (ddp)
    shards       fsdp2: a part of every parameter, local tensors for the optimizer
"""
