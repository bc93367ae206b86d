"""Tenants: who owns which key, and what each may do.

Owns the table from keys to principals, its sources (--api-key, --api-keys-file, OCTAVO_API_KEYS) and
its reload while the server runs: a new table replaces the old one whole, or not at all. A tenant's
quota outlives a reload. Keeps digests, never keys; nothing here can be printed that opens a door.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server.quota import Quota
from octavo.server.tenant_file import Limits, TenantEntry, parse_tenants, read_tenants

log = logging.getLogger("octavo.server")

UNLIMITED = Limits()
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller.

    tenant: name for logs, metrics and fair share; "key-0" for the first --api-key, "" where the server has no keys.
    domain: prefix-cache domain, derived from the key with a secret of this process, "" without keys.
    weight: share of the engine beside other tenants.
    """

    tenant: str = ""
    domain: str = ""
    admin: bool = False
    weight: float = 1.0
    limits: Limits = UNLIMITED
    quota: Quota = field(default_factory=lambda: Quota("", UNLIMITED))

    def priorities(self, lowest: int) -> tuple[int, int]:
        """The most and the least urgent priority that this caller may ask for; `lowest` where nothing of its own is set."""
        high = MAX_PRIORITY if self.limits.max_priority is None else self.limits.max_priority
        return min(lowest, high) if self.limits.min_priority is None else self.limits.min_priority, high

    def may_use(self, model: str) -> bool:
        return self.limits.models is None or model in self.limits.models

    def check_model(self, model: str) -> None:
        """Raises ApiError 403 for a model that this key may not use."""
        if not self.may_use(model):
            raise ApiError(403, "This key may not use that model (limit: models).", param="model", code="model_not_allowed")


class Keys:
    """A set of SHA-256 digests of keys that answers which one was presented, in time that does not depend on them."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._digests = list(digests)

    @classmethod
    def plain(cls, keys: Sequence[str], what: str) -> Keys:
        """Of the keys themselves. Raises ConfigError for an empty one; `what` is where they come from."""
        for key in keys:
            if not key.strip():
                raise ConfigError(f"{what}: an empty key would let everybody in; remove it or set a real one")
        return cls(map(digest_of, keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def find(self, presented: str) -> int | None:
        """Index of the key that equals `presented`; every key is compared, whatever matches first."""
        digest = digest_of(presented)
        found = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found

    def shared(self, other: Keys) -> bool:
        """Whether a key is in both."""
        return not set(self._digests).isdisjoint(other._digests)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class _Tenant:
    name: str
    weight: float
    limits: Limits
    digests: list[bytes]


class Tenants:
    """The tenants in force. Raises ConfigError, when made and on `reload`, for sources that cannot be used."""

    def __init__(self, config: ServerConfig, *, read: Callable[[str], tuple[TenantEntry, ...]] = read_tenants) -> None:
        self._config, self._read = config, read
        self._secret = secrets.token_bytes(32)
        self._quotas: dict[str, Quota] = {}
        self._nobody = Principal()
        self.admins = Keys.plain(config.admin_api_key, "--admin-api-key")
        self._keys, self._principals = self._table()

    def __bool__(self) -> bool:
        """Whether client routes need a key at all."""
        return bool(self._keys)

    def __len__(self) -> int:
        return len({principal.tenant for principal in self._principals})

    @property
    def names(self) -> list[str]:
        """Names of all tenants, in the order of their sources: the closed set of values that a label may take."""
        return list(dict.fromkeys(principal.tenant for principal in self._principals))

    @property
    def quotas(self) -> list[Quota]:
        """The quota of every tenant in force, for metrics."""
        return [self._quotas[name] for name in self.names]

    @property
    def nobody(self) -> Principal:
        """The caller of a server without keys."""
        return self._nobody

    @property
    def reloadable(self) -> bool:
        return self._config.api_keys_file is not None

    def unserved(self, names: Collection[str]) -> list[tuple[str, list[str]]]:
        """Tenants whose limit `models` names what is none of `names`, and those models: a mistake, or a model yet to come."""
        limited = {p.tenant: [m for m in p.limits.models or () if m not in names] for p in self._principals}
        return [(tenant, models) for tenant, models in limited.items() if models]

    @property
    def ranked(self) -> list[str]:
        """Tenants that have a range of priorities of their own."""
        return [p.tenant for p in self._principals if p.limits.min_priority is not None or p.limits.max_priority is not None]

    def find(self, presented: str) -> Principal | None:
        """Whose key this is, None if nobody's."""
        index = self._keys.find(presented)
        return None if index is None else self._principals[index]

    def reload(self) -> None:
        """Read the file again. Raises ConfigError and leaves everything as it was if it cannot be used."""
        before = self.names
        self._keys, self._principals = self._table()
        gone = [name for name in before if name not in self.names]
        new = [name for name in self.names if name not in before]
        log.info("tenants reloaded: %d in force; new: %s; gone: %s", len(self), ", ".join(new) or "-", ", ".join(gone) or "-")

    def _table(self) -> tuple[Keys, list[Principal]]:
        tenants = self._tenants()
        owners: dict[bytes, str] = {}
        names: set[str] = set()
        for tenant in tenants:
            if tenant.name in names:
                raise ConfigError(f"tenant {tenant.name!r} is defined twice; give each its own name")
            names.add(tenant.name)
            for digest in tenant.digests:
                if digest in owners:
                    raise ConfigError(f"tenants {owners[digest]!r} and {tenant.name!r} have a key in common; each needs its own")
                owners[digest] = tenant.name
        keys = Keys(owners)
        if keys.shared(self.admins):
            raise ConfigError("--admin-api-key: one key is also a client's key, which would make that client an administrator")
        # Everything that can fail has been done: from here on quotas may change.
        return keys, [principal for tenant in tenants for principal in self._principals_of(tenant)]

    def _principals_of(self, tenant: _Tenant) -> list[Principal]:
        """One per key: tenants share nothing, and neither do a tenant's keys share cached prefixes."""
        quota = self._quotas.setdefault(tenant.name, Quota(tenant.name, tenant.limits))
        quota.limit(tenant.limits)
        domains = [hmac.new(self._secret, digest, hashlib.sha256).hexdigest()[:32] for digest in tenant.digests]
        return [Principal(tenant.name, domain, False, tenant.weight, tenant.limits, quota) for domain in domains]

    def _tenants(self) -> list[_Tenant]:
        """Every tenant of every source."""
        config = self._config
        Keys.plain(config.api_key, "--api-key")  # an empty key must stop the start
        tenants = [_Tenant(f"key-{i}", 1.0, UNLIMITED, [digest_of(key)]) for i, key in enumerate(config.api_key)]
        entries: list[TenantEntry] = []
        if config.api_keys is not None:
            entries += parse_tenants(config.api_keys, "OCTAVO_API_KEYS")
        if config.api_keys_file is not None:
            entries += self._read(config.api_keys_file)
        for entry in entries:
            digests = [*map(digest_of, entry.key), *map(bytes.fromhex, entry.key_sha256)]
            tenants.append(_Tenant(entry.name, entry.weight, entry.limits, list(dict.fromkeys(digests))))
        return tenants
