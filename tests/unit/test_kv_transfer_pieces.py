"""Cutting and coverage: every unit of a transfer is in exactly one piece, and pieces are as large as slots allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kvcache.layout import KvLayout
from kv_transfer.pieces import Coverage, Piece, PieceCutter, plan_geometry


def layout_of(num_layers: int, unit_floats: int) -> KvLayout:
    return KvLayout(num_layers=num_layers, block_size=1, num_kv_heads=1, head_dim=unit_floats, dtype="float32")


@st.composite
def layouts_and_slots(draw: st.DrawFn) -> tuple[KvLayout, int]:
    layout = layout_of(draw(st.integers(1, 40)), draw(st.integers(1, 16)))
    return layout, layout.block_bytes * draw(st.integers(1, 100)) + draw(st.integers(0, layout.block_bytes - 1))


@given(layouts_and_slots(), st.lists(st.integers(1, 9), max_size=12), st.data())
def test_every_unit_is_cut_exactly_once_however_blocks_arrive(
    case: tuple[KvLayout, int], pushes: list[int], data: st.DataObject
) -> None:
    layout, slot_bytes = case
    geometry = plan_geometry(layout, slot_bytes)
    cutter, coverage = PieceCutter(geometry), Coverage(layout.num_layers, sum(pushes))
    for push in pushes:
        cutter.add(push)
        for _ in range(data.draw(st.integers(0, cutter.num_left()))):
            piece = cutter.cut()
            assert piece is not None
            assert coverage.claim(piece)
            assert piece.num_units * geometry.block_bytes <= slot_bytes
    while (piece := cutter.cut()) is not None:
        assert coverage.claim(piece)
    assert coverage.is_complete
    assert cutter.num_left() == 0


@given(layouts_and_slots(), st.integers(0, 30))
def test_num_left_says_how_many_pieces_follow(case: tuple[KvLayout, int], num_blocks: int) -> None:
    layout, slot_bytes = case
    cutter = PieceCutter(plan_geometry(layout, slot_bytes))
    cutter.add(num_blocks)
    expected = cutter.num_left()
    pieces = 0
    while cutter.cut() is not None:
        pieces += 1
        assert cutter.num_left() == expected - pieces
    assert pieces == expected


@given(layouts_and_slots())
def test_a_full_piece_fills_more_than_half_its_slot(case: tuple[KvLayout, int]) -> None:
    layout, slot_bytes = case
    geometry = plan_geometry(layout, slot_bytes)
    full_units, slot_units = geometry.layers_per_piece * geometry.blocks_per_piece, slot_bytes // layout.block_bytes
    assert slot_units < 2 * full_units <= 2 * slot_units


def test_small_blocks_are_gathered_into_large_pieces() -> None:
    # SmolLM2-135M in float32: 16 tokens × 3 heads × 64 × K and V.
    layout = KvLayout(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype="float32")
    geometry = plan_geometry(layout, 4 << 20)
    cutter = PieceCutter(geometry)
    cutter.add(10)
    piece = cutter.cut()
    assert piece == Piece(0, 30, 0, 5)
    assert piece.num_units * geometry.block_bytes > 2 << 20


def test_a_block_larger_than_a_slot_is_split_by_layers_evenly() -> None:
    layout = layout_of(10, 128)  # 1 KiB a unit
    cutter = PieceCutter(plan_geometry(layout, 9 << 10))
    cutter.add(2)
    pieces = [cutter.cut() for _ in range(4)]
    assert pieces == [Piece(0, 5, 0, 1), Piece(5, 5, 0, 1), Piece(0, 5, 1, 1), Piece(5, 5, 1, 1)]


def test_one_layer_larger_than_a_slot_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"1024 bytes.* only 1023"):
        plan_geometry(layout_of(2, 128), 1023)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(0, 0, 0, 1),
        Piece(0, 1, 0, 0),
        Piece(0, 4, 0, 1),
        Piece(2, 2, 0, 1),
        Piece(0, 1, 4, 2),
        Piece(-1, 1, 0, 1),
        Piece(0, 1, -1, 1),
        Piece(0, 1 << 40, 0, 1),
        Piece(0, 1, 1 << 40, 1),
        Piece(0, -1, 0, 1),
    ],
)
def test_a_piece_out_of_bounds_is_not_claimed(piece: Piece) -> None:
    coverage = Coverage(3, 5)
    assert not coverage.claim(piece)
    assert coverage.claim(Piece(0, 3, 0, 5))
    assert coverage.is_complete


def test_an_overlapping_piece_is_not_claimed_until_the_first_is_unclaimed() -> None:
    coverage = Coverage(3, 5)
    assert coverage.claim(Piece(0, 2, 0, 3))
    assert not coverage.claim(Piece(1, 2, 2, 2))
    coverage.unclaim(Piece(0, 2, 0, 3))
    assert coverage.claim(Piece(1, 2, 2, 2))


def test_nothing_to_cover_is_complete() -> None:
    assert Coverage(3, 0).is_complete
