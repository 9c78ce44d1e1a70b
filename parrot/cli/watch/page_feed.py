"""The views of the page, as an operator or the holder of an API key has them."""

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from parrot.cli.run import host_and_port, operator_token
from parrot.cli.watch.http_lines import RequestFailed, Server
from parrot.gateway.page.visitors import page_key
from parrot.utils.addresses import is_loopback

Row = dict[str, Any]
Rows = dict[str, Row]


class PageFeed:
    """One visitor of one ServeCore."""

    def __init__(self, core: str, config_path: Path | None, api_key: str | None) -> None:
        """Raises `RequestFailed` that says what to do, and `ConfigError`."""
        self._core = core
        host, port = host_and_port(core)
        self._server = Server(host, port)
        if self._is_let_in():
            return
        if api_key is None and config_path is None and not is_loopback(host):
            # This user's own token is for servers of this machine.
            raise RequestFailed(f"{core} asks for a key: --api_key, or its config by --config_path")
        self._enter(page_key(operator_token(config_path)) if api_key is None else api_key)

    def rows(self, view: str) -> Iterator[Rows]:
        """All rows of a view, now and after each change, for ever. Raises `RequestFailed`."""
        rows: Rows = {}
        for data in self._server.events("GET", f"/ui/api/{view}"):
            try:
                changes = json.loads(data)
                rows = changes["rows"] if changes["whole"] else {**rows, **changes["rows"]}
                for key in changes["gone"]:
                    rows.pop(key, None)
            except (ValueError, KeyError, TypeError):
                raise RequestFailed(f"{self._core} is of another version: {data:.80}") from None
            yield rows
        raise RequestFailed(f"{self._core} has ended the view")

    def now(self, view: str) -> Rows:
        """The rows of a view. Raises `RequestFailed`."""
        return next(self.rows(view))

    def _is_let_in(self) -> bool:
        try:
            self._server.ask("GET", "/ui/api/me")
        except RequestFailed as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                return False
            if error.status == HTTPStatus.NOT_FOUND:
                raise RequestFailed(
                    f"{self._core} is no ServeCore, or one without its page (`page`: false); the "
                    "page's views are what this command shows"
                ) from None
            raise
        return True

    def _enter(self, key: str) -> None:
        try:
            _, headers = self._server.ask("POST", "/ui/api/enter", {"key": key})
        except RequestFailed as error:
            raise RequestFailed(
                f"{error}. The key is made of the cluster token: give ServeCore's config file "
                "(--config_path) or an API key (--api_key)",
                error.status,
            ) from None
        self._server.headers["Cookie"] = headers.get("Set-Cookie", "").partition(";")[0]
