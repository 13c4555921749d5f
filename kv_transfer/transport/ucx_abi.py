"""libucp through cffi in ABI mode: no compiler, no CUDA. Declares only what transport/ucx.py uses.

Layouts are those of <ucp/api/ucp.h> 1.14 to 1.22; every struct has a field_mask (or op_attr_mask), so that a library of
another version reads only what was filled in, and fields after the last one used need not be declared.
Trap: ucs_status_t is a packed enum, one byte. Declared as int, its upper bytes are garbage.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any, Final

import cffi

from common.telemetry import get_logger
from kv_transfer.transport.base import TransportError, TransportFault

SYSTEM_LIBRARY: Final = "libucp.so.0"
# The version whose API we speak, passed to ucp_init_version: any newer library of major version 1 serves it. 1.13
# aborts the whole process when a peer goes away while it connects (openucx/ucx pull request 8175).
MIN_VERSION: Final = (1, 14)
PROBE_TIMEOUT_S: Final = 10.0
_VERSION_PROBE: Final = """
import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).ucp_get_version_string
version.restype = ctypes.c_char_p
print(version().decode())
"""

STATUS_OK: Final = 0
STATUS_IN_PROGRESS: Final = 1
STATUS_BUSY: Final = -15

CONTEXT_FIELD_FEATURES: Final = 1 << 0
FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4
WORKER_FIELD_THREAD_MODE: Final = 1 << 0
THREAD_MODE_SINGLE: Final = 0
EP_FIELD_REMOTE_ADDRESS: Final = 1 << 0
EP_FIELD_ERR_HANDLING_MODE: Final = 1 << 1
EP_FIELD_ERR_HANDLER: Final = 1 << 2
ERR_HANDLING_PEER: Final = 1
MEM_FIELD_ADDRESS: Final = 1 << 0
MEM_FIELD_LENGTH: Final = 1 << 1
OP_FIELD_FLAGS: Final = 1 << 4
OP_FIELD_MEMH: Final = 1 << 8
EP_CLOSE_FORCE: Final = 1 << 0

log = get_logger(__name__)

ffi: Final = cffi.FFI()
ffi.cdef("""
typedef int8_t ucs_status_t;
typedef void *ucs_status_ptr_t;
typedef void *ucp_context_h, *ucp_worker_h, *ucp_ep_h, *ucp_mem_h, *ucp_rkey_h, *ucp_config_h;
typedef struct {
    uint64_t field_mask, features; size_t request_size; void *request_init, *request_cleanup; uint64_t tag_sender_mask;
    int mt_workers_shared; size_t estimated_num_eps, estimated_num_ppn; const char *name; size_t node_local_id;
} ucp_params_t;
typedef struct {
    uint64_t field_mask; int thread_mode; unsigned long cpu_mask[16]; unsigned events; void *user_data; int event_fd;
    uint64_t flags; const char *name; size_t am_alignment; uint64_t client_id;
} ucp_worker_params_t;
typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;
typedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status);
typedef struct { ucp_err_handler_cb_t cb; void *arg; } ucp_err_handler_t;
typedef struct {
    uint64_t field_mask; const void *address; int err_mode; ucp_err_handler_t err_handler; void *user_data;
    unsigned flags; ucs_sock_addr_t sockaddr; void *conn_request; const char *name; ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;
typedef struct {
    uint64_t field_mask; void *address; size_t length; unsigned flags, prot; int memory_type;
    const void *exported_memh_buffer;
} ucp_mem_map_params_t;
typedef struct {
    uint32_t op_attr_mask, flags; void *request; void *cb; uint64_t datatype; void *user_data; void *reply_buffer;
    int memory_type; void *recv_info; ucp_mem_h memh; uint64_t reserved[3];
} ucp_request_param_t;

const char *ucp_get_version_string(void);
const char *ucs_status_string(ucs_status_t);
ucs_status_t ucs_global_opts_set_value(const char *name, const char *value);
ucs_status_t ucp_config_read(const char *env_prefix, const char *filename, ucp_config_h *);
ucs_status_t ucp_config_modify(ucp_config_h, const char *name, const char *value);
void ucp_config_release(ucp_config_h);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *, ucp_config_h, ucp_context_h *);
void ucp_cleanup(ucp_context_h);
ucs_status_t ucp_worker_create(ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *);
void ucp_worker_destroy(ucp_worker_h);
ucs_status_t ucp_worker_get_address(ucp_worker_h, void **, size_t *);
void ucp_worker_release_address(ucp_worker_h, void *);
unsigned ucp_worker_progress(ucp_worker_h);
ucs_status_t ucp_worker_get_efd(ucp_worker_h, int *);
ucs_status_t ucp_worker_arm(ucp_worker_h);
ucs_status_t ucp_ep_create(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *);
ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h, const ucp_request_param_t *);
ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h, const ucp_request_param_t *);
void ucp_ep_print_info(ucp_ep_h, void *stream);
void ucp_context_print_info(ucp_context_h, void *stream);
ucs_status_t ucp_mem_map(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *);
ucs_status_t ucp_mem_unmap(ucp_context_h, ucp_mem_h);
ucs_status_t ucp_rkey_pack(ucp_context_h, ucp_mem_h, void **, size_t *);
void ucp_rkey_buffer_release(void *);
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h, const void *, ucp_rkey_h *);
void ucp_rkey_destroy(ucp_rkey_h);
ucs_status_ptr_t ucp_put_nbx(ucp_ep_h, const void *, size_t, uint64_t remote, ucp_rkey_h, const ucp_request_param_t *);
ucs_status_t ucp_request_check_status(void *);
void ucp_request_free(void *);

void *open_memstream(char **buffer, size_t *size);
int fclose(void *stream);
void free(void *);
""")


def load_libucp(configured: str = "") -> tuple[Any, str]:
    """The library and where it was found: `configured` only, if given; else the system's (it has verbs where the
    hardware has RDMA) if it is recent enough; else the wheel's (it has no verbs). Raises TransportError
    (UNAVAILABLE)."""
    _keep_hooks_out()
    if configured:
        return _load_configured(configured), configured
    version = _probe_system_version()
    if version >= MIN_VERSION:
        return ffi.dlopen(SYSTEM_LIBRARY), SYSTEM_LIBRARY
    if version:
        log.warning("the system's UCX is too old", version=_dotted(version), minimum=_dotted(MIN_VERSION))
    return _load_from_wheel()


def _keep_hooks_out() -> None:
    """Unless the environment asks for them: UCX would overwrite the first instructions of mmap, munmap, brk and madvise
    in the running process, for a cache of registrations, while other threads may be executing them (a crash that UCX's
    own tests see: openucx/ucx pull request 11795); and from then on run in every thread that gives memory back. All
    memory here is registered by name, so that the cache has nothing to do. UCX reads this as it is loaded, only."""
    os.environ.setdefault("UCX_MEM_EVENTS", "n")


def _load_configured(path: str) -> Any:
    try:
        lib: Any = ffi.dlopen(path)
    except OSError as error:
        message = f"can't load UCX from {path!r}: {error}; check the setting ucx_library"
        raise TransportError(TransportFault.UNAVAILABLE, message) from None
    version = _parse_version(c_string(lib.ucp_get_version_string()))
    if version < MIN_VERSION:
        message = f"UCX in {path!r} has version {_dotted(version)}, at least {_dotted(MIN_VERSION)} is needed"
        raise TransportError(TransportFault.UNAVAILABLE, message)
    return lib


def _probe_system_version() -> tuple[int, ...]:
    """Version of the system's library; () if there is none. Asked in a process of its own: once an old library is
    loaded, the wheel's parts would bind to it, for they bear the same names."""
    try:
        probe = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _VERSION_PROBE, SYSTEM_LIBRARY],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _parse_version(probe.stdout) if probe.returncode == 0 else ()


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _load_from_wheel() -> tuple[Any, str]:
    try:
        import libucx

        libucx.load_library()
        path = os.path.join(os.path.dirname(libucx.__file__), "lib", "libucp.so")
        return ffi.dlopen(path), path
    except (ImportError, OSError) as error:
        raise TransportError(
            TransportFault.UNAVAILABLE,
            f"no UCX library: neither a recent {SYSTEM_LIBRARY} nor the package libucx can be loaded ({error}); "
            "install libucx-cu12, or name a library in the setting ucx_library",
        ) from None


def check(lib: Any, status: int, what: str) -> None:
    """Raises TransportError (UNAVAILABLE) unless `status` is success."""
    if status < STATUS_OK:
        raise TransportError(TransportFault.UNAVAILABLE, f"UCX {what} failed: {status_text(lib, status)}")


def status_text(lib: Any, status: int) -> str:
    return f"{c_string(lib.ucs_status_string(status))} ({status})"


def c_string(pointer: Any) -> str:
    value = ffi.string(pointer)
    return value.decode() if isinstance(value, bytes) else value


def request_status(pointer: Any) -> int | None:
    """Outcome of a posted operation that ended at once; None where `pointer` is a request still under way."""
    value = int(ffi.cast("intptr_t", pointer))
    if value == 0:
        return STATUS_OK
    return value if -128 <= value < 0 else None


def address_of(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def take_bytes(pointer: Any, size: Any) -> bytes:
    return bytes(ffi.buffer(pointer, size))


def describe_endpoint(lib: Any, endpoint: Any) -> str:
    """The report of ucp_ep_print_info, lanes included."""
    return _report(lib.ucp_ep_print_info, endpoint)


def describe_context(lib: Any, context: Any) -> str:
    """The report of ucp_context_print_info: resources that UCX found here."""
    return _report(lib.ucp_context_print_info, context)


def _report(print_info: Any, handle: Any) -> str:
    libc: Any = ffi.dlopen(None)
    text, size = ffi.new("char **"), ffi.new("size_t *")
    stream = libc.open_memstream(text, size)
    if stream == ffi.NULL:
        return ""
    print_info(handle, stream)
    libc.fclose(stream)
    try:
        return take_bytes(text[0], size[0]).decode(errors="replace")
    finally:
        libc.free(text[0])
