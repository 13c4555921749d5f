"""What the preemption policy needs to know of sequences, pool and host tier, and the pins of what was swapped out.

Swapping copies nothing at once: the victim's full blocks stay in the pool's cache until somebody needs the room, move
to host memory then, where their hashes are pinned, and come back when the sequence is resumed. What never had to move
was never copied. Its last, partly filled block is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from common.engine.cost_rates import CostRates
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import PrefixCache
from decode_service.preemption import Candidate, Means, VictimPolicy
from decode_service.sequence import DecodeSequence


class Preemptor:
    """Looks at pool and cache, which it borrows; owns the pins of the sequences that it swapped out."""

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, rates: CostRates, block_size: int, policy: VictimPolicy
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._rates = rates
        self._block_size = block_size
        self._policy = policy
        self.num_swapped_total = 0

    def choose(self, running: Sequence[DecodeSequence]) -> tuple[DecodeSequence, Means]:
        """Of `running`, who must not all be guaranteed, the victim and its means."""
        able = [sequence for sequence in running if not sequence.is_guaranteed]
        index, means = self._policy([self.candidate(sequence) for sequence in able], self._rates)
        return able[index], means

    def choose_any(self, running: Sequence[DecodeSequence]) -> DecodeSequence:
        """A victim that makes room for no other: the guaranteed ones come last."""
        able = [sequence for sequence in running if not sequence.is_guaranteed] or list(running)
        index, _ = self._policy([self.candidate(sequence) for sequence in able], self._rates)
        return able[index]

    def candidate(self, sequence: DecodeSequence) -> Candidate:
        block_ids = sequence.block_table.block_ids
        num_freed = sum(self._pool.references(block_id) == 1 for block_id in block_ids)
        num_kept = 0
        while num_kept < sequence.num_registered_blocks and self._pool.references(block_ids[num_kept]) > 1:
            num_kept += 1
        hashes = sequence.block_hashes[: sequence.num_registered_blocks]
        host = self._cache.host
        return Candidate(
            priority=sequence.priority,
            arrival=sequence.arrival,
            num_tokens=sequence.num_computed_tokens,
            num_kept_tokens=num_kept * self._block_size,
            num_saved_tokens=len(hashes) * self._block_size,
            num_freed_blocks=num_freed,
            num_saves=0 if host is None else sum(block_hash not in host for block_hash in hashes[num_kept:]),
            num_loads=len(hashes) - num_kept,
            can_swap=host is not None and host.can_pin(hashes),
        )

    def loss_ns(self, sequence: DecodeSequence) -> int:
        """What it would cost to have its KV again."""
        return self.candidate(sequence).loss(self._rates)[0]

    def swap_out(self, sequence: DecodeSequence) -> None:
        """To be called while it has its blocks. From now on host memory keeps what the pool evicts of them."""
        hashes = sequence.block_hashes[: sequence.num_registered_blocks]
        if self._cache.host is not None and self._cache.host.pin(hashes):
            sequence.pinned_hashes = hashes
            self.num_swapped_total += 1

    def let_go(self, sequence: DecodeSequence) -> None:
        """It is resumed or ends: its content is as any other's again."""
        if self._cache.host is not None and sequence.pinned_hashes:
            self._cache.host.unpin(sequence.pinned_hashes)
            sequence.pinned_hashes = []

    @staticmethod
    def pins(sequences: Iterable[DecodeSequence]) -> Counter[bytes]:
        """What these hold, by hash."""
        return Counter(block_hash for sequence in sequences for block_hash in sequence.pinned_hashes)
