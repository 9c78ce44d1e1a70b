"""Changed keys: what they change in the service, and that they did."""

from parrot.serve.core import ServeCore
from parrot.serve.page.audit import AuditLog
from parrot.serve.tenants.table import KeysChange
from parrot.serve.tenants.watch import KeysWatch


def keys_watch(core: ServeCore, audit: AuditLog) -> KeysWatch:
    def changed(change: KeysChange) -> None:
        audit.event("keys changed", "ok", **change._asdict())
        core.keys_changed()

    def refused(reason: str) -> None:
        audit.event("keys changed", "refused", reason=reason)

    return KeysWatch(core.tenants, core.clock, changed, refused)
