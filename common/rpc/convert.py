"""baton.common.v1 to and from our own types: errors and finish reasons; and errors as RPC statuses with their details.

Who converts another package's messages (each service's convert.py) takes these from here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2  # type: ignore[import-untyped]

from baton.common.v1 import common_pb2
from common.errors import BatonError, ErrorKind
from common.sampling_params import FinishReason

# Where gRPC's rich error model keeps its details.
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"

_KIND_TO_PROTO: Final = {kind: common_pb2.ErrorKind.Value(f"ERROR_KIND_{kind.name}") for kind in ErrorKind}
_KIND_FROM_PROTO: Final = {number: kind for kind, number in _KIND_TO_PROTO.items()}
_REASON_TO_PROTO: Final = {r: common_pb2.FinishReason.Value(f"FINISH_REASON_{r.name}") for r in FinishReason}
_REASON_FROM_PROTO: Final = {number: reason for reason, number in _REASON_TO_PROTO.items()}


class RpcStatus(NamedTuple):
    """Arguments of ServicerContext.abort."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _REASON_TO_PROTO[reason]


def finish_reason_from_proto(number: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for UNSPECIFIED, and for a reason that this version does not know."""
    return _REASON_FROM_PROTO.get(number)


def error_to_proto(error: BatonError) -> common_pb2.ErrorDetail:
    return common_pb2.ErrorDetail(
        kind=_KIND_TO_PROTO[error.kind],
        message=error.message,
        param=error.param or "",
        retry_after_ms=round((error.retry_after_s or 0.0) * 1e3),
    )


def error_from_proto(detail: common_pb2.ErrorDetail) -> BatonError:
    """A kind that this version does not know becomes INTERNAL."""
    kind = _KIND_FROM_PROTO.get(detail.kind, ErrorKind.INTERNAL)
    retry_after_s = detail.retry_after_ms / 1e3 if detail.retry_after_ms else None
    return BatonError(kind, detail.message, param=detail.param or None, retry_after_s=retry_after_s)


def error_to_status(error: BatonError) -> RpcStatus:
    code = error.row.grpc_status
    packed = any_pb2.Any()
    packed.Pack(error_to_proto(error))
    status = status_pb2.Status(code=code.value[0], message=error.message, details=[packed])
    return RpcStatus(code, error.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))


def error_from_rpc(error: grpc.aio.AioRpcError, peer: str) -> BatonError:
    """What the peer said; LEASE_LOST where it could not say anything."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            detail = common_pb2.ErrorDetail()
            status = status_pb2.Status.FromString(value)
            if status.details and status.details[0].Unpack(detail):
                return error_from_proto(detail)
    return BatonError(ErrorKind.LEASE_LOST, f"lost {peer}: {error.code().name}: {error.details()}")
