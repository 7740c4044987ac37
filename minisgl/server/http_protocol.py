"""HTTP for clients that offer to speak something newer."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with every ``Upgrade`` declined the way RFC 9110 (7.8) has it: by an answer in HTTP/1.1.

    Java's own client offers h2c with each first request. The parser then takes the body for the new protocol's bytes,
    and the request would arrive without it. So such a head goes through a second parser, with the offer left out:

        POST ... Upgrade: h2c | {"messages": ...}      the first parser stops at |
        POST ...              | {"messages": ...}      the second begins anew and goes on behind |
    """

    def data_received(self, data: bytes) -> None:
        try:
            rest = self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        if rest is None:
            return
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response("CONNECT is not supported.")
            return
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        head += b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + b"\r\n" + rest)

    def _feed(self, data: bytes) -> bytes | None:
        """What lies behind a head that offers an upgrade; None where there is no such head."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return data[upgrade.args[0] :]
        return None

    def _should_upgrade(self) -> bool:
        # With this answer the callbacks of the base class leave the request alone that the first parser has stopped at.
        return True
