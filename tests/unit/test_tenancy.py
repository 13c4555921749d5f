"""Tenants: keys, stores, and who is let in."""

from __future__ import annotations

import asyncio
import json
import stat

import msgspec
import pytest

from common.errors import BatonError, ErrorKind, StartupError
from common.kvcache.block_hash import hash_seed
from deploy import cli
from router.policy.token_bucket import LocalBucket
from router.tenancy.directory import TenantDirectory
from router.tenancy.store import FileTenantStore, TenantStoreError
from router.tenancy.tenant import ANONYMOUS, Tenant, key_digest, new_key


class Kept:
    def __init__(self, *tenants: Tenant) -> None:
        self.tenants = list(tenants)

    async def read(self):
        return self.tenants


async def directory(*tenants: Tenant) -> TenantDirectory:
    made = TenantDirectory(Kept(*tenants))
    await made.load()
    return made


async def test_a_key_lets_its_tenant_in_and_nothing_else_does():
    key = new_key()
    known = await directory(Tenant("acme", key_digest(key)), Tenant("keyless"))
    assert known.authenticate(f"Bearer {key}").name == "acme"
    assert known.authenticate(f"bearer  {key} ").name == "acme"
    for wrong in (None, "", key, "Bearer", "Bearer ", f"Basic {key}", f"Bearer {key}x", f"Bearer {key_digest(key)}",
                  "Bearer " + "x" * 10_000, "Bearer \udce4"):  # fmt: skip
        with pytest.raises(BatonError) as caught:
            known.authenticate(wrong)
        assert caught.value.kind is ErrorKind.UNAUTHENTICATED


async def test_a_revoked_key_is_known_and_refused():
    key = new_key()
    known = await directory(Tenant("acme", key_digest(key), revoked=True))
    with pytest.raises(BatonError, match="revoked") as caught:
        known.authenticate(f"Bearer {key}")
    assert caught.value.kind is ErrorKind.PERMISSION_DENIED


def test_without_keys_everybody_is_the_anonymous_tenant():
    assert TenantDirectory(None).authenticate(None) is ANONYMOUS
    assert hash_seed("f", "salt", tenant=ANONYMOUS.cache_scope) == hash_seed("f", "salt")


def test_tenants_share_no_cached_block_unless_they_are_of_one_group():
    tenants = Tenant("a"), Tenant("b"), Tenant("c", cache_group="g"), Tenant("d", cache_group="g"), Tenant("g")
    seeds = [hash_seed("f", "", tenant=t.cache_scope) for t in tenants]
    assert seeds[2] == seeds[3]
    assert len({*seeds, hash_seed("f")}) == 5
    assert hash_seed("f", "tenant:a") != hash_seed("f", tenant="tenant:a"), "a salt poses as no tenant"


@pytest.mark.parametrize(
    "fields",
    [{"name": "A"}, {"name": ""}, {"name": "a", "weight": 0}, {"name": "a", "kv_share": 2}, {"name": "a b"},
     {"name": "a", "tokens_per_minute": -1}, {"name": "a", "cache_group": "x:y"},
     {"name": "a", "weight": float("nan")}],
)  # fmt: skip
def test_a_tenant_out_of_range_is_refused_in_one_line(fields):
    with pytest.raises(ValueError, match="must be"):
        Tenant(**fields)


def test_priority_is_no_more_urgent_than_the_ceiling():
    assert [Tenant("a", priority_ceiling=2).priority_of(asked) for asked in (None, -5, 2, 7)] == [2, 2, 2, 7]
    assert Tenant("a", priority_ceiling=-3).priority_of(-9) == -3


async def test_a_file_keeps_tenants_without_their_keys(tmp_path):
    store, key = FileTenantStore(tmp_path / "t.json"), new_key()
    assert await store.read() == []
    tenant = Tenant("acme", key_digest(key), weight=2.0)
    await store.change("acme", lambda known: tenant)
    assert await store.read() == [tenant]
    path = tmp_path / "t.json"
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_changes_at_the_same_time_lose_nothing(tmp_path):
    store = FileTenantStore(tmp_path / "t.json")
    await asyncio.gather(*(store.change(f"t{i}", lambda _, i=i: Tenant(f"t{i}")) for i in range(20)))
    assert len(await store.read()) == 20


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        '{"tenants": [{"name": "a", "wieght": 1}]}',
        '{"tenants": [{"name": "A"}]}',
        '{"tenants": [{"name": "a"}, {"name": "a"}]}',
    ],
)
async def test_a_broken_file_stops_the_start_and_not_a_running_router(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TenantStoreError):
        await FileTenantStore(path).read()
    with pytest.raises(StartupError) as caught:
        await TenantDirectory(FileTenantStore(path)).load()
    assert "\n" not in str(caught.value)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["baton", "tenant", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out.strip(), captured.err.strip()


def test_the_command_creates_lists_changes_rotates_and_revokes(tmp_path, capsys):
    where = ("--tenants-file", str(tmp_path / "t.json"))
    _, key, _ = run(capsys, "create", "acme", *where, "--weight", "2")
    assert run(capsys, "create", "acme", *where)[0] == 2
    assert run(capsys, "update", "acme", *where, "--max-concurrent", "3")[0] == 0
    assert run(capsys, "update", "acme", *where, "--weight", "0")[0] == 2
    _, other, _ = run(capsys, "rotate", "acme", *where)
    assert run(capsys, "revoke", "acme", *where)[0] == 0
    _, listed, _ = run(capsys, "list", *where)
    shown = json.loads(listed)
    assert (shown["weight"], shown["max_concurrent"], shown["revoked"]) == (2.0, 3, True)
    assert key not in listed
    assert key != other
    stored = msgspec.json.decode((tmp_path / "t.json").read_bytes())["tenants"][0]
    assert stored["key_digest"] == key_digest(other)
    code, _, error = run(capsys, "revoke", "nobody", *where)
    assert code == 2
    assert "no tenant nobody" in error
    assert "Pass --tenants-file" in run(capsys, "list")[2]


def test_a_bucket_gives_a_minutes_worth_and_then_says_when():
    bucket = LocalBucket(0.0, 2, 100)
    assert bucket.take(0.0, 2, 100, 0, 60) is None
    assert bucket.take(0.0, 2, 100, 0, 60) == (pytest.approx(12.0), "tokens_per_minute")
    assert bucket.take(12.0, 2, 100, 0, 60) is None
    assert bucket.take(12.0, 2, 100, 0, 0)[1] == "requests_per_minute"
    assert LocalBucket(0.0, 0, 0, num_running=1).take(0.0, 0, 0, 1, 5) == (1.0, "max_concurrent")


def test_what_is_larger_than_a_minutes_worth_goes_once_and_leaves_a_debt():
    bucket = LocalBucket(0.0, 0, 100)
    assert bucket.take(0.0, 0, 100, 0, 300) is None
    wait_s, _ = bucket.take(0.0, 0, 100, 0, 1)
    assert wait_s == pytest.approx(120.6)
