"""The table of tenants, and the tenant of a request with a key."""

from pathlib import Path

import pytest

from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.config import CoreConfig
from parrot.serve.tenants.table import PUBLIC_ID, Tenant, TenantTable, id_of_key
from tests.serve.tenants.keys import entry, write_keys


def test_each_api_key_is_a_tenant() -> None:
    table = TenantTable(CoreConfig(api_keys=("alpha", "beta")))
    assert table.is_closed
    alpha, beta = table.of_key("alpha"), table.of_key("beta")
    assert alpha != beta
    assert alpha == Tenant(alpha.id) == table.find(alpha.id)
    assert "alpha" not in alpha.id
    assert alpha.id != id_of_key("alpha")  # A digest alone would help to guess a short key.
    for wrong in (None, "", "gamma", "alph", "\ud800"):
        with pytest.raises(AuthenticationFailed):
            table.of_key(wrong)


def test_ids_of_keys_need_the_servers_secret_and_survive_a_new_token() -> None:
    first, again, other = (
        TenantTable(CoreConfig(api_keys=("alpha",), cluster_token=token))
        for token in ("t", "t", "u")
    )
    name = first.of_key("alpha").id
    assert again.of_key("alpha").id == name
    assert other.of_key("alpha").id != name
    other.restored(b"", first.names_secret)  # The journal keeps the first secret.
    assert other.of_key("alpha").id == name
    assert other.find(name) is not None
    assert other.current_id(id_of_key("alpha")) == name  # in journals of older versions


def test_without_configured_keys_each_made_up_key_is_a_tenant() -> None:
    table = TenantTable(CoreConfig())
    assert not table.is_closed
    assert table.of_key(None).id == PUBLIC_ID
    made_up = table.of_key("alpha")
    assert made_up.id == id_of_key("alpha")
    assert table.find(made_up.id) is None
    assert not table.is_named(made_up.id)


def test_a_share_group_has_one_secret_salt(tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys.json",
        entry("a", "k1", share_group="g"),
        entry("b", "k2", share_group="g"),
        entry("g", "k3"),
        entry("c", "k4"),
    )
    config = CoreConfig(keys_file=path, cluster_token="secret")
    table = TenantTable(config)
    salts = {name: table.cache_salt(name) for name in ("a", "b", "g", "c", "public")}
    assert salts["a"] == salts["b"]
    assert len(set(salts.values())) == 4
    assert TenantTable(config).cache_salt("a") == salts["a"]
    others = (config.model_copy(update={"cluster_token": "x"}), CoreConfig(keys_file=path))
    for other in others:
        assert TenantTable(other).cache_salt("a") != salts["a"]


def test_without_a_cluster_token_salts_come_from_the_journal() -> None:
    tables = [TenantTable(CoreConfig()) for _ in range(2)]
    assert tables[0].cache_salt("public") != tables[1].cache_salt("public")
    for table in tables:
        table.restored(b"the journal's", b"of names")
    assert tables[0].cache_salt("public") == tables[1].cache_salt("public")
    configured = TenantTable(CoreConfig(cluster_token="secret"))
    before = configured.cache_salt("public")
    configured.restored(b"the journal's", b"of names")
    assert configured.cache_salt("public") == before
