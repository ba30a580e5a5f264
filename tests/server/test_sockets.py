import socket

import pytest

from servax.core.errors import StartupError, UsageError
from servax.server.sockets import listen, url_of


def test_port_zero_picks_a_free_one():
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert port > 0
        assert url_of(listening) == f"http://127.0.0.1:{port}"


def test_every_address_is_reached_by_loopback():
    with listen("0.0.0.0", 0) as listening:
        assert url_of(listening).startswith("http://127.0.0.1:")


def test_a_taken_port_says_what_to_do():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            listen("127.0.0.1", port)
    assert caught.value.what == "the port is taken by another process"
    assert caught.value.where == f"127.0.0.1:{port}"
    assert "port 0" in caught.value.remedy


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(StartupError, match="cannot be listened at"):
        listen("192.0.2.1", 0)
    for host in ("no such host", "x" * 100, "\ud800"):
        with pytest.raises(StartupError, match="cannot be listened at"):
            listen(host, 0)


@pytest.mark.parametrize("port", [-1, 65536, 99999, 2**70])
def test_ports_that_do_not_exist_are_a_wrong_call(port):
    with pytest.raises(UsageError, match="no such port") as caught:
        listen("127.0.0.1", port)
    assert (caught.value.seen, caught.value.expected) == (str(port), "0 to 65535")
