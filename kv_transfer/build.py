"""Both ends of KV transfer as the settings ask for them: every worker may send, and every worker may receive."""

from __future__ import annotations

from common.config import Settings
from common.kvcache.layout import KvStore
from common.rpc.worker_messages import WorkerIdentity
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.transport.select import make_transport
from kv_transfer.types import KvFormat


def make_sender(settings: Settings, store: KvStore, fmt: KvFormat, identity: WorkerIdentity, slots: int) -> KvSender:
    """slots: of its staging. As large as one landing ring is enough: no more can be under way to a single peer."""
    return KvSender(
        store,
        fmt,
        identity,
        transport=make_transport(settings),
        staging_slots=slots,
        staging_slot_bytes=settings.landing_slot_bytes,
        lease_s=settings.transfer_lease_s,
        require_transport=settings.require_transport,
    )


def make_receiver(
    settings: Settings, store: KvStore, fmt: KvFormat, identity: WorkerIdentity, slots: int
) -> KvReceiver:
    """slots: of its landing ring."""
    return KvReceiver(
        store,
        fmt,
        identity,
        transport=make_transport(settings),
        landing_slots=slots,
        landing_slot_bytes=settings.landing_slot_bytes,
        lease_s=settings.transfer_lease_s,
        require_transport=settings.require_transport,
    )
