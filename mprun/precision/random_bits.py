"""Random bits without a generator: a hash of where they are used.

A generator's state would have to be saved, shared between replicas and advanced in the same order
on every device. A counter-based hash has no state (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011): the bits are a function of the run's seed, the optimizer step, the tensor (of a
parameter, the hash of its name), the site (which of its results) and the element's index in the
whole tensor. So they are the same on every device, on every replica, and after resuming. The first
four are mixed on the host into two 32-bit keys (splitmix64's finalizer); for each element

    h = (index ^ low) * 0xed5ad4bb;  h ^= h >> 11
    h = (h ^ high)    * 0xac4c1b51;  h ^= h >> 15
    h = h             * 0x31848bab;  h ^= h >> 14

modulo 2^32. Not for cryptography.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

NAME = "_mprun_name"  # The attribute of a parameter that holds its name
# That of a shard: the flat index of its first element in the whole parameter; 0 without it
START = "_mprun_start"
# Python's integers have no bound: products of the host are taken modulo 2^64
MASK = 2**64 - 1
# Elements hashed with one key: an index has 31 bits, what is above them enters the key
BLOCK = 2**31


class Key(NamedTuple):
    """What the bits of one result of one tensor at one step depend on; both below 2^32."""

    low: int
    high: int

    def at(self, index: int) -> Key:
        """The key of the elements from `index` on, a multiple of `BLOCK`."""
        assert index % BLOCK == 0
        return self if index == 0 else key(self.low, self.high, index // BLOCK)


def key(*parts: int) -> Key:
    """Mix integers (seed, step, tensor, site) into a key; changing one changes about half of it."""
    return _key(_mixed(0, *parts))


def shared(*parts: int) -> int:
    """Seed and step, which all tensors of a step share, mixed: the `state` of `keys_of`."""
    return _mixed(0, *parts)


def keys_of(state: int, tensor: int, sites: int) -> list[Key]:
    """`key(*parts, tensor, site)` for each site below `sites`, with the `shared` parts."""
    whole = _mixed(state & MASK, tensor)
    return [_key(_mixed(whole, site)) for site in range(sites)]


def _key(state: int) -> Key:
    return Key(state & 0xFFFFFFFF, state >> 32)


def _mixed(state: int, *parts: int) -> int:
    for part in parts:
        state = _splitmix(state ^ (part & MASK))
    return state


def _splitmix(state: int) -> int:
    # 2^64 over the golden ratio; the multipliers are those of splitmix64 (Steele et al., 2014)
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@lru_cache(maxsize=2**16)
def tensor_number(name: str) -> int:
    """The number, of 64 bits, of a tensor with a name."""
    # Python's own hash of a text differs from process to process
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def name_parameters(model: nn.Module, prefix: str = "") -> None:
    """Give the parameters of `model` their names, by which `mprun.optim` draws random bits.

    After `name_parameters(model)`, two optimizers, or the shards of one, round with different bits,
    and replicas with the same bits. `Precision.prepare` does it.

    Args:
        model: any; each of its parameters gets its name.
        prefix: put before the names, to distinguish several models.
    """
    for name, p in model.named_parameters():
        setattr(p, NAME, f"{prefix}{name}")


def mark_shard(p: Tensor, name: str, start: int) -> None:
    """Mark `p` as a part of a parameter, so that `mprun.optim` draws the random bits of this part.

    Steps on the shards then give the bits of a step on the whole. Call `mark_shard(p, name, start)`
    after `Precision.prepare` and `name_parameters`, before the first step. It stays where `p.data`
    is replaced.

    Args:
        p: a range of the flat whole, contiguous in memory, as FSDP2's local shards are (parts along
            dimension 0); it may be empty.
        name: of the whole, as `name_parameters` would give it.
        start: the index of its first element in the flat whole.

    Raises:
        ValueError: `start` is below 0.
    """
    if start < 0:
        raise ValueError(f"a shard of {name} with start={start}; legal is 0 or more")
    setattr(p, NAME, name)
    setattr(p, START, start)


class Span(NamedTuple):
    """Elements of a tensor whose bits are hashed with one key."""

    begin: int
    end: int
    block: int  # The multiple of `BLOCK` for `Key.at`
    first: int  # The index of element `begin` after `block`, for `hash_bits`


def spans(start: int, count: int) -> Iterator[Span]:
    """The elements of a tensor cut where the key changes.

    Args:
        start: the index of the first element, in the whole tensor.
        count: of elements; with 0 there are no spans.
    """
    begin = 0
    while begin < count:
        first = (start + begin) % BLOCK
        end = min(count, begin + BLOCK - first)
        yield Span(begin, end, start + begin - first, first)
        begin = end


def signed(word: int, bits: int = 32) -> int:
    """A word as the signed integer with the same bits."""
    return word - 2**bits if word >= 2 ** (bits - 1) else word


def shift_right(word: Tensor, by: int) -> Tensor:
    """int32 words shifted right with zeros coming in (torch's shift repeats the sign)."""
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1)


def hash_bits(index: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """32 random bits (int32) for each int32 `index`; keys as ints of 32 bits or int32 tensors."""
    # int32, because PyTorch lacks most operations for uint32
    low = signed(low) if isinstance(low, int) else low
    high = signed(high) if isinstance(high, int) else high
    # The constants of Wellons' triple32 ("hash-prospector", 2018). Two keys: with one, the
    # sequences of two tensors or steps would be shifted copies of each other.
    word = (index ^ low).mul_(signed(0xED5AD4BB))
    word.bitwise_xor_(shift_right(word, 11))
    word.bitwise_xor_(high).mul_(signed(0xAC4C1B51))
    # Three products: with two, the bits of elements 3072 apart are correlated
    word.bitwise_xor_(shift_right(word, 15)).mul_(0x31848BAB)
    return word.bitwise_xor_(shift_right(word, 14))


def random_bits(key: Key, count: int, device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """32 random bits for the elements `start` to `start + count` of a tensor, int32 [count]."""
    parts = []
    for begin, end, block, first in spans(start, count):
        index = torch.arange(first, first + end - begin, dtype=torch.int32, device=device)
        parts.append(hash_bits(index, *key.at(block)))
    if not parts:
        return torch.empty(0, dtype=torch.int32, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
