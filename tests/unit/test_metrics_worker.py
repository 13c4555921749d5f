"""A worker's metrics: what steps, ended legs and transfers add, and what they cost."""

from __future__ import annotations

from itertools import count

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.engine.messages import EngineNews, LegOutput, OwnerNews, StepShape
from common.engine.sequence import Sequence
from common.errors import BatonError, ErrorKind
from common.rpc.worker_messages import LoadReport, SequenceSpec, Timings
from common.sampling_params import FinishReason, SamplingParams
from common.worker.info import WorkerInfo
from common.worker.metrics import HANDED_OVER, WorkerMetrics
from kv_transfer.metrics import FAILURE_REASONS, ReceiverCollector, SenderCollector
from kv_transfer.stats import ReceiverStats, SenderStats
from kv_transfer.types import TransferStats

IDS = (f"t{i}" for i in count())


class Page:
    """A worker's registry, with transfers that stand still."""

    def __init__(self, role: str, sender: SenderStats | None = None) -> None:
        info = WorkerInfo("w", "e", role, "127.0.0.1:1", "", "m", "f", "float32", 16, 100, 512)
        collector = SenderCollector(lambda: sender or SENDER, 8) if role == "prefill" else ReceiverCollector(receiver)
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.registry, info, [collector])

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def end(self, **fields) -> None:
        self.tell(LegOutput(next(IDS), leg_ended=True, **fields))

    def tell(self, *outputs: LegOutput, step_s: float | None = None, shape: StepShape | None = None) -> None:
        load = LoadReport(num_blocks=100, num_free_blocks=100)
        self.metrics.on_news(EngineNews({1: OwnerNews(outputs=list(outputs))}, load, None, step_s, step_shape=shape))


SENDER = SenderStats(
    ended={"done": 2, "failed": 1}, failed={ErrorKind.LEASE_LOST: 1}, dropped_frames={"late": 3}, pieces_sent=5,
    pieces_resent=1, bytes_sent=1000, open_transfers=1, free_staging_slots=6,
    lanes={"d0": ("rc_mlx5/mlx5_0:1", "cma/memory"), "d1": ("cma/memory",)},
)  # fmt: skip


def receiver() -> ReceiverStats:
    return ReceiverStats(
        ended={}, failed={}, dropped_frames={}, refused_handshakes=0, pieces_landed=0, pieces_rejected=0,
        bytes_landed=0, open_transfers=0, num_channels=0, slots={"free": 4},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "phase", "prefill", "decode"),
    [
        (StepShape(2, 300, 0), "prefill", 300, 0),
        (StepShape(7, 0, 7), "decode", 0, 7),
        (StepShape(8, 256, 7), "mixed", 256, 7),
    ],
)
def test_a_step_counts_in_its_phase_and_its_tokens_in_theirs(shape, phase, prefill, decode):
    page = Page("decode")
    page.tell(step_s=0.25, shape=shape)
    for each in ("prefill", "decode", "mixed"):
        assert page.value("baton_step_seconds_sum", phase=each) == (0.25 if each == phase else 0)
    assert page.value("baton_step_tokens_sum", phase="prefill") == prefill
    assert page.value("baton_step_tokens_sum", phase="decode") == decode
    assert page.value("baton_step_tokens_count", phase="decode") == bool(decode), "no step is counted as one of nothing"
    assert page.value("baton_step_batch_size_sum") == shape.num_sequences


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_end_of_a_leg_can_be_counted(role):
    page = Page(role)
    for kind in ErrorKind:
        page.end(error=BatonError(kind, "x"))
        assert page.value("baton_legs_total", outcome=str(kind)) == 1
    for reason in FinishReason:
        page.end(finish_reason=reason, timings=Timings(queue_s=1.0))
        assert page.value("baton_legs_total", outcome=str(reason)) == 1
    assert page.value("baton_request_queue_seconds_count") == len(FinishReason)
    assert page.value("baton_request_prefill_seconds_count") == 0, "what did not happen is not counted as quick"


def test_a_prefill_leg_ends_handed_over_and_tells_what_its_transfer_hid():
    page = Page("prefill")
    page.end(timings=Timings(prefill_s=1.0, transfer_s=0.5, overlap_s=0.4))
    assert page.value("baton_legs_total", outcome=HANDED_OVER) == 1
    assert page.value("baton_transfer_overlap_ratio_sum") == pytest.approx(0.8)
    page.tell(LegOutput("running", token_ids=(1,)))
    assert page.value("baton_legs_total", outcome=HANDED_OVER) == 1, "a token is no end"


@pytest.mark.parametrize(
    ("first_token_at", "transferred_at", "transfer_s", "overlap_s"),
    [
        (10.0, 12.0, 4.0, 2.0),
        (10.0, 12.0, 2.0, 0.0),
        (10.0, 12.0, 1.0, 0.0),
        (13.0, 12.0, 1.0, 1.0),
        (None, 12.0, 1.0, 0.0),
    ],
)
def test_overlap_is_the_part_of_the_transfer_before_the_first_token(
    first_token_at, transferred_at, transfer_s, overlap_s
):
    spec = SequenceSpec("t", "r", [1, 2], 2, b"s" * 16, SamplingParams(max_tokens=4), deadline=99.0)
    sequence = Sequence(spec, 0, 0, 0.0, 16)
    sequence.first_token_at = first_token_at
    assert sequence.timings(20.0).overlap_s == 0.0, "nothing was transferred"
    sequence.note_transfer(TransferStats(transfer_s, 100, transferred_at))
    assert sequence.timings(20.0).overlap_s == overlap_s


def test_transfers_show_every_value_of_their_labels_from_the_start():
    page = Page("decode")
    for reason in FAILURE_REASONS:
        assert page.value("baton_transfer_failures_total", reason=str(reason)) == 0
    for state in ("committed", "aborted", "expired"):
        assert page.value("baton_transfers_total", state=state) == 0
    assert page.value("baton_transfers_total", state="receiving") is None, "only ends are counted"
    assert page.value("baton_transfer_landing_slots", state="free") == 4
    assert page.value("baton_transfer_landing_slots", state="quarantined") == 0
    assert page.value("baton_transfer_dropped_frames_total", reason="wrong_secret") == 0


def test_a_senders_statistics_reach_the_page():
    page = Page("prefill")
    assert page.value("baton_transfers_total", state="done") == 2
    assert page.value("baton_transfer_failures_total", reason="lease_lost") == 1
    assert page.value("baton_transfer_dropped_frames_total", reason="late") == 3
    assert page.value("baton_transfer_bytes_total") == 1000
    assert page.value("baton_transfer_pieces_resent_total") == 1
    assert page.value("baton_transfer_staging_slots", state="used") == 2
    assert page.value("baton_transfer_channels") == 2
    assert page.value("baton_transfer_lanes_info", transport="rc_mlx5", device="mlx5_0:1") == 1
    assert page.value("baton_transfer_lanes_info", transport="cma", device="memory") == 1, "however many peers"


def test_nothing_in_an_engines_round_looks_a_label_up(monkeypatch):
    page = Page("decode")

    def refuse(*_, **__):
        raise AssertionError("a label look-up")

    for family in (Counter, Gauge, Histogram):
        monkeypatch.setattr(family, "labels", refuse)
    page.tell(step_s=0.25, shape=StepShape(8, 256, 7))
    page.end(finish_reason=FinishReason.STOP, timings=Timings(1.0, 1.0, 1.0, 100, 0.0, 1.0))
    assert page.value("baton_request_decode_seconds_count") == 1


def test_a_prefill_workers_page_shows_nothing_that_it_cannot_have():
    page = Page("prefill")
    assert page.value("baton_preemptions_total") is None
    assert page.value("baton_step_seconds_count", phase="decode") is None
    assert page.value("baton_request_decode_seconds_count") is None
