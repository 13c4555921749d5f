"""Both workers on one host: pieces are gathered straight into the decode worker's landing ring, without a put."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from common.errors import ErrorKind
from kv_transfer.transport.shared_memory import SharedMemory, open_shared
from kv_transfer.types import TransferStats
from tests.integration.test_kv_transfer import Outbound, away, sending
from tests.kv_fakes import SMALL, DecodeOptions, NumpyKvStore, RemoteDecode, remote_decode

IDS = list(range(20, 40))
NUM_BYTES = len(IDS) * SMALL.num_layers * SMALL.block_bytes


class SpoilingStore(NumpyKvStore):
    """Its first `num_spoiled` gathers leave a wrong byte behind the checksum, as a stray write into the slot would."""

    def __init__(self, num_spoiled: int) -> None:
        super().__init__(SMALL, 64, seed=3)
        self.left = num_spoiled

    def gather(self, first_layer: int, num_layers: int, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> int:
        checksum = super().gather(first_layer, num_layers, block_ids, out)
        if self.left:
            self.left -= 1
            out[out.size // 2] ^= 1
        return checksum


@pytest.fixture(scope="module")
def decode() -> Iterator[RemoteDecode]:
    with remote_decode(DecodeOptions(shares_ring=True)) as remote:
        yield remote


async def test_what_arrives_is_what_was_sent_and_no_staging_slot_was_used(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=1)
    async with sending(store) as sender:
        outbound = Outbound(sender, "direct", await away(decode.reserve, "direct", IDS[::-1]), len(IDS))
        outbound.send_all(IDS)
        result = await outbound.result()
        assert isinstance(result, TransferStats)
        assert result.num_bytes == NUM_BYTES
        assert sender.stats().lanes["decode-0"][0] == "shared-ring/memory"
        assert await away(decode.ask, "blocks", IDS[::-1]) == store.blocks(IDS)


async def test_a_spoiled_slot_is_gathered_again(decode: RemoteDecode) -> None:
    store = SpoilingStore(2)
    async with sending(store) as sender:
        outbound = Outbound(sender, "again", await away(decode.reserve, "again", IDS), len(IDS))
        outbound.send_all(IDS)
        assert isinstance(await outbound.result(), TransferStats)
        assert sender.stats().pieces_resent == 2
        assert await away(decode.ask, "blocks", IDS) == store.blocks(IDS)


async def test_a_piece_that_is_always_spoiled_ends_the_transfer_on_both_sides(decode: RemoteDecode) -> None:
    async with sending(SpoilingStore(1 << 30)) as sender:
        outbound = Outbound(sender, "rotten", await away(decode.reserve, "rotten", IDS), len(IDS))
        outbound.send_all(IDS)
        assert (await outbound.error()).kind is ErrorKind.CORRUPT_KV
        outcome = await away(decode.outcome, "rotten")
        assert outcome[:2] == ("failed", ErrorKind.CORRUPT_KV)


def test_a_mapping_outlives_its_maker_s_descriptor_and_shares_its_bytes() -> None:
    memory = SharedMemory(1 << 16)
    mapped = open_shared(memory.descriptor())
    assert mapped is not None
    memory.close()
    mapped[77] = 5
    assert memory.view[77] == 5
    assert open_shared(memory.descriptor()) is None


def test_another_process_maps_it_too() -> None:
    memory = SharedMemory(4096)
    script = (
        "import sys; from kv_transfer.transport.shared_memory import open_shared\n"
        "open_shared(bytes.fromhex(sys.argv[1]))[9] = 3"
    )
    subprocess.run([sys.executable, "-c", script, memory.descriptor().hex()], check=True, timeout=30)
    assert memory.view[9] == 3
    memory.close()


@pytest.mark.parametrize(("field", "value"), [(0, 1), (1, 0), (2, "baton-ring-other"), (3, 8192)])
def test_a_descriptor_that_leads_elsewhere_maps_nothing(field: int, value: object) -> None:
    memory = SharedMemory(4096)
    parts = msgspec.msgpack.decode(memory.descriptor())
    parts[field] = value
    assert open_shared(msgspec.msgpack.encode(parts)) is None
    assert open_shared(b"garbage") is None
    memory.close()
