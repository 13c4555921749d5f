"""An error stays itself on its way over gRPC, whichever way it takes."""

from __future__ import annotations

import grpc
import pytest

from baton.common.v1 import common_pb2
from common.errors import BatonError, ErrorKind
from common.rpc import convert
from common.sampling_params import FinishReason


@pytest.mark.parametrize("kind", ErrorKind)
def test_errors_of_every_kind_survive_the_wire(kind: ErrorKind) -> None:
    error = BatonError(kind, "what, where", param="x", retry_after_s=1.5)
    detail = common_pb2.ErrorDetail.FromString(convert.error_to_proto(error).SerializeToString())
    back = convert.error_from_proto(detail)
    assert (back.kind, back.message, back.param, back.retry_after_s) == (kind, "what, where", "x", 1.5)


def test_what_is_not_said_stays_unsaid() -> None:
    back = convert.error_from_proto(convert.error_to_proto(BatonError(ErrorKind.DRAINING, "m")))
    assert (back.param, back.retry_after_s) == (None, None)


def test_an_unknown_kind_is_a_bug_and_an_unknown_reason_is_none() -> None:
    assert convert.error_from_proto(common_pb2.ErrorDetail.FromString(b"\x08\x63")).kind is ErrorKind.INTERNAL
    assert convert.error_from_proto(common_pb2.ErrorDetail()).kind is ErrorKind.INTERNAL
    assert convert.finish_reason_from_proto(99) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_wire(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


def rpc_error(trailing: grpc.aio.Metadata) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailing, details="text")


def test_a_refusal_keeps_its_kind_and_message_through_the_status() -> None:
    error = BatonError(ErrorKind.STALE_EPOCH, "epoch 'b', not 'a'")
    status = convert.error_to_status(error)
    assert (status.code, status.details) == (grpc.StatusCode.ABORTED, error.message)
    back = convert.error_from_rpc(rpc_error(grpc.aio.Metadata(*status.trailing_metadata)), "peer")
    assert (back.kind, back.message) == (error.kind, error.message)


def test_an_rpc_that_just_failed_is_a_lost_lease_that_names_the_peer() -> None:
    back = convert.error_from_rpc(rpc_error(grpc.aio.Metadata()), "decode worker d")
    assert back.kind is ErrorKind.LEASE_LOST
    assert "decode worker d" in back.message
