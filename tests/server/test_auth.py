import hmac
from pathlib import Path

import pytest

from servax.core.errors import Forbidden, StartupError, Unauthorized
from servax.core.events import Event, Notice, listening
from servax.server import auth
from servax.server.auth import Access, Identity, Keys, KeySources

ALICE, BOB, ROOT = "a" * 16, "b" * 40, "r" * 32
INFER, LOAD = "/v2/models/net/infer", "/v2/repository/models/net/load"
GRPC_INFER, GRPC_LOAD = (f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "RepositoryModelLoad"))


@pytest.fixture
def files(tmp_path: Path) -> KeySources:
    (tmp_path / "keys").write_text(f"# who may ask\n\nalice:{ALICE}\n  {BOB}  \n")
    (tmp_path / "admins").write_text(f"root: {ROOT}\n")
    return KeySources(tmp_path / "keys", tmp_path / "admins")


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def test_keys_have_names_or_are_called_by_their_line(files):
    keys = Keys(files)
    assert keys.identify(ALICE.encode()) == Identity("alice", False)
    assert keys.identify(BOB.encode()) == Identity("api-4", False)
    assert keys.identify(ROOT.encode()) == Identity("root", True)


@pytest.mark.parametrize("key", ["", "a" * 15, "a" * 17, ALICE.upper(), f"alice:{ALICE}", f" {ALICE}", "é" * 16])
def test_another_key_is_nobody_s(files, key):
    assert Keys(files).identify(key.encode()) is None


def test_every_key_is_compared_in_constant_time(files, monkeypatch):
    seen = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    keys = Keys(files)
    for presented in (b"x" * 16, ALICE.encode()):
        seen.clear()
        keys.identify(presented)
        assert len(seen) == 3
        assert {len(each) for pair in seen for each in pair} == {32}
        assert presented not in [each for pair in seen for each in pair]


def test_a_key_of_an_administrator_s_is_one_wherever_it_stands_besides(tmp_path):
    (tmp_path / "keys").write_text(ROOT)
    keys = Keys(KeySources(tmp_path / "keys", admin_key=ROOT))
    assert keys.identify(ROOT.encode()) == Identity("admin", True)


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ALICE),
        {b"authorization": f"bearer  {ALICE}".encode()},
        {b"x-api-key": ALICE.encode()},
        {b"authorization": b"Basic Zm9v", b"x-api-key": ALICE.encode()},
    ],
)
def test_a_key_travels_in_either_header(files, headers):
    identity = Access(Keys(files)).http(INFER, headers)
    assert identity is not None
    assert identity.name == "alice"


@pytest.mark.parametrize("headers", [{}, bearer("x" * 16), {b"authorization": ALICE.encode()}, {b"x-api-key": b""}])
@pytest.mark.parametrize("path", [INFER, LOAD, "/", "/metrics", "/v2/health/live", "/v2/health/ready", "/nope"])
def test_without_one_nothing_is_open(files, headers, path):
    with pytest.raises(Unauthorized):
        Access(Keys(files)).http(path, headers)


def test_what_changes_the_server_needs_an_administrator_s(files):
    access = Access(Keys(files))
    with pytest.raises(Forbidden, match="administrator"):
        access.http(LOAD, bearer(ALICE))
    with pytest.raises(Forbidden):
        access.grpc(GRPC_LOAD, {"authorization": f"Bearer {ALICE}"})
    assert access.http(LOAD, bearer(ROOT)) == access.grpc(GRPC_LOAD, {"x-api-key": ROOT}) == Identity("root", True)
    assert access.http(INFER, bearer(ROOT)) == Identity("root", True)


def test_an_administrator_s_key_alone_closes_only_what_changes_the_server():
    access = Access(Keys(KeySources(admin_key=ROOT)))
    assert access.http(INFER, {}) is None
    for path in (LOAD, LOAD.replace("load", "unload")):
        with pytest.raises(Unauthorized):
            access.http(path, {})


def test_without_an_administrator_s_key_any_key_may_load():
    access = Access(Keys(KeySources(key=ALICE)))
    assert access.http(LOAD, bearer(ALICE)) == Identity("api", False)


@pytest.mark.parametrize("method", [GRPC_INFER, GRPC_LOAD, "/grpc.health.v1.Health/Check"])
def test_grpc_is_closed_alike(files, method):
    access = Access(Keys(files))
    for metadata in ({}, {"authorization": "Bearer nope"}, {"x-api-key": "nöpe"}):
        with pytest.raises(Unauthorized):
            access.grpc(method, metadata)


def test_health_of_grpc_can_be_opened_and_nothing_else_with_it(files):
    access = Access(Keys(files), open_health=True)
    service = "/inference.GRPCInferenceService"
    for method in ("/grpc.health.v1.Health/Watch", f"{service}/ServerLive", f"{service}/ServerReady"):
        assert access.grpc(method, {}) is None
    for method in (f"{service}/ServerMetadata", GRPC_INFER, "/grpc.reflection.v1alpha.ServerReflection/x"):
        with pytest.raises(Unauthorized):
            access.grpc(method, {})


def test_a_changed_file_is_read_anew(files):
    keys, said = Keys(files), list[Event]()
    assert keys.identify(ALICE.encode()) is not None
    with listening(said.append):
        keys.refresh()
        assert said == []
        files.file.write_text("carol:" + "c" * 16)
        keys.refresh()
    assert keys.identify(ALICE.encode()) is None
    assert keys.identify(b"c" * 16) == Identity("carol", False)
    (notice,) = said
    assert isinstance(notice, Notice)
    assert notice.fields == {"keys": "2"}


@pytest.mark.parametrize("content", ["", "# nothing\n", "short", None])
def test_a_file_that_is_no_good_leaves_the_former_keys_in_force(files, content):
    keys, said = Keys(files), list[Event]()
    files.file.unlink() if content is None else files.file.write_text(content)
    with listening(said.append):
        keys.refresh(force=True)
    assert keys.identify(ALICE.encode()) == Identity("alice", False)
    (notice,) = said
    assert isinstance(notice, Notice)
    assert "former keys stay" in notice.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has none"),
        ("net:short", "too short"),
        (f"a b{ALICE}", "cannot travel"),
        ("clé:" + "é" * 16, "cannot travel"),
    ],
)
def test_a_file_without_a_good_key_is_refused(tmp_path, content, said):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(StartupError, match=said) as caught:
        Keys(KeySources(path))
    assert str(path) in str(caught.value)
    assert ALICE not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "no text"),
        (b"0123456789abcdef\0\n", "no text"),
        (b"# " + b"x" * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(tmp_path, content, said):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=said) as caught:
        Keys(KeySources(path))
    assert str(path) in str(caught.value)


def test_a_file_without_an_end_is_refused_after_its_beginning():
    with pytest.raises(StartupError, match="more than"):
        Keys(KeySources(Path("/dev/zero")))


def test_a_file_of_keys_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf" + ALICE.encode())
    assert Keys(KeySources(path)).identify(ALICE.encode()) is not None


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StartupError, match="cannot be read"):
        Keys(KeySources(tmp_path / "nope"))


def test_an_empty_key_of_the_environment_opens_nothing():
    with pytest.raises(StartupError, match="SERVAX_API_KEY"):
        Keys(KeySources(key=""))
