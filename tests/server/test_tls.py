import ssl
from pathlib import Path

import grpc
import httpx2
import pytest
import trustme

import serving_toys as toys
from servax.core.errors import StartupError
from servax.core.events import Event, Notice, listening
from servax.server.background import BackgroundServer, serve
from servax.server.tls import Tls, TlsFiles

LIVE = "/inference.GRPCInferenceService/ServerLive"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


class Pki:
    """An authority, a server's certificate and a client's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        self.issue("server", "127.0.0.1")
        self.issue("client", "someone@example.com")

    def issue(self, name: str, identity: str) -> None:
        issued = self.authority.issue_cert(identity)
        issued.private_key_pem.write_to_path(self.path(f"{name}.key"))
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(self.path(f"{name}.pem"), append=number > 0)

    def path(self, name: str) -> Path:
        return self.folder / name

    def files(self) -> dict[str, str]:
        return {"tls_cert": str(self.path("server.pem")), "tls_key": str(self.path("server.key"))}

    def trusting(self, *, shown: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.pem"))
        if shown:
            context.load_cert_chain(self.path("client.pem"), self.path("client.key"))
        return context

    def channel(self, address: str, *, shown: bool = False) -> grpc.Channel:
        pair = [self.path(f"client.{each}").read_bytes() for each in ("key", "pem")] if shown else [None, None]
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.path("ca.pem").read_bytes(), *pair))


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


def is_live(channel: grpc.Channel) -> bool:
    with channel:
        return channel.unary_unary(LIVE)(b"", timeout=30) == b"\x08\x01"


def asked(server: BackgroundServer, context: ssl.SSLContext) -> int:
    with httpx2.Client(verify=context) as http:
        return http.post(f"{server.url}/v2/models/toy/infer", json=BODY).status_code


def test_http_and_grpc_over_tls(servable, pki):
    with serve(servable, 0, grpc_port=0, **pki.files()) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert asked(server, pki.trusting()) == 200
        assert is_live(pki.channel(server.grpc))
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            asked(server, ssl.create_default_context())
        with pytest.raises(httpx2.TransportError):
            httpx2.get(server.url.replace("https", "http"))
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(LIVE)(b"", timeout=5)


def test_a_client_must_show_a_certificate_where_it_is_asked_to(servable, pki):
    with serve(servable, 0, grpc_port=0, **pki.files(), tls_client_ca=str(pki.path("ca.pem"))) as server:
        assert asked(server, pki.trusting(shown=True)) == 200
        assert is_live(pki.channel(server.grpc, shown=True))
        with pytest.raises(httpx2.TransportError):
            asked(server, pki.trusting())
        with pytest.raises(grpc.RpcError):
            is_live(pki.channel(server.grpc))
        (pki.folder / "other").mkdir()
        stranger = Pki(pki.folder / "other")
        context = pki.trusting()
        context.load_cert_chain(stranger.path("client.pem"), stranger.path("client.key"))
        with pytest.raises(httpx2.TransportError):
            asked(server, context)


def test_versions_before_1_2_are_not_spoken(pki):
    tls = Tls(TlsFiles(pki.path("server.pem"), pki.path("server.key")))
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    assert _handshake(tls.context, client) in ("TLSv1.2", "TLSv1.3")


def test_a_renewed_certificate_is_shown_to_new_connections(pki):
    tls = Tls(TlsFiles(pki.path("server.pem"), pki.path("server.key")))
    before = _shown(tls, pki)
    tls.refresh()
    assert _shown(tls, pki) == before
    pki.issue("server", "127.0.0.1")
    tls.refresh(force=True)
    assert _shown(tls, pki) != before


def test_clients_of_an_authority_that_was_taken_away_are_refused(servable, pki, tmp_path):
    (tmp_path / "new").mkdir()
    new, trusted = Pki(tmp_path / "new"), tmp_path / "clients.pem"
    of_new = pki.trusting()
    of_new.load_cert_chain(new.path("client.pem"), new.path("client.key"))
    trusted.write_bytes(pki.path("ca.pem").read_bytes())
    with serve(servable, 0, grpc_port=0, **pki.files(), tls_client_ca=str(trusted)) as server:
        assert asked(server, pki.trusting(shown=True)) == 200
        with pytest.raises(httpx2.TransportError):
            asked(server, of_new)
        trusted.write_bytes(new.path("ca.pem").read_bytes())
        server._front.reload()
        assert asked(server, of_new) == 200
        with pytest.raises(httpx2.TransportError):
            asked(server, pki.trusting(shown=True))
        with pytest.raises(grpc.RpcError):
            is_live(pki.channel(server.grpc, shown=True))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_nor_do_they_come_in_by_a_session_of_before(pki, tmp_path, version):
    (tmp_path / "new").mkdir()
    new, trusted = Pki(tmp_path / "new"), tmp_path / "clients.pem"
    trusted.write_bytes(pki.path("ca.pem").read_bytes())
    tls = Tls(TlsFiles(pki.path("server.pem"), pki.path("server.key"), trusted))
    client = pki.trusting(shown=True)
    client.maximum_version = version
    session = _objects(tls.context, client)[0].session
    trusted.write_bytes(new.path("ca.pem").read_bytes())
    tls.refresh(force=True)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        _objects(tls.context, client, session)


def test_files_that_do_not_fit_leave_the_former_certificate_in_force(pki):
    tls = Tls(TlsFiles(pki.path("server.pem"), pki.path("server.key")))
    before, said = _shown(tls, pki), list[Event]()
    pki.path("server.key").write_bytes(pki.path("client.key").read_bytes())
    with listening(said.append):
        tls.refresh(force=True)
    assert _shown(tls, pki) == before
    (notice,) = said
    assert isinstance(notice, Notice)
    assert "former certificate stays" in notice.message


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("server.pem", "client.key", "KEY_VALUES_MISMATCH"),
        ("nope.pem", "server.key", "no file"),
        ("server.key", "server.key", "do not load"),
        ("server.pem", "encrypted.key", "encrypted"),
    ],
)
def test_files_that_cannot_be_used_are_named(pki, certificate, key, said):
    from cryptography.hazmat.primitives import serialization as form

    private = form.load_pem_private_key(pki.path("server.key").read_bytes(), None)
    encrypted = private.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret")
    )
    pki.path("encrypted.key").write_bytes(encrypted)
    with pytest.raises(StartupError) as caught:
        Tls(TlsFiles(pki.path(certificate), pki.path(key)))
    assert said in str(caught.value)
    assert certificate in str(caught.value)


def test_authorities_that_cannot_be_used_are_named(pki):
    with pytest.raises(StartupError, match="authorities"):
        Tls(TlsFiles(pki.path("server.pem"), pki.path("server.key"), pki.path("server.key")))


def _objects(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a connection in memory, after the handshake and a byte of the server's, behind which tickets are."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(down, up, server_hostname="127.0.0.1", session=session),
        server.wrap_bio(up, down, server_side=True),
    )
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    ends[1].write(b"x")
    ends[0].read(1)
    return ends


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    return _objects(server, client)[0].version()


def _shown(tls: Tls, pki: Pki) -> bytes | None:
    return _objects(tls.context, pki.trusting())[0].getpeercert(binary_form=True)
