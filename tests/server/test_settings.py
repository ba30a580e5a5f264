import inspect
import os

import pytest
import typer

from servax.cli import serve
from servax.core.errors import UsageError
from servax.server.settings import PREFIX, Settings, make, resolve


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    for name in [each for each in os.environ if each.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "servax.toml"
    path.write_text('http = 7002\nmax-delay = "5ms"\nmax_body = "1MiB"\ncors-origin = ["http://a", "http://b"]\n')
    return path


def test_the_command_line_goes_before_the_file_before_the_environment_before_defaults(file, monkeypatch):
    monkeypatch.setenv("SERVAX_HTTP", "7001")
    monkeypatch.setenv("SERVAX_MAX_BODY", "2MiB")
    monkeypatch.setenv("SERVAX_GRPC", "-1")
    resolved = resolve({"http": 7003}, file=file)
    settings, origins = resolved.settings, resolved.origins
    assert (settings.http, origins["http"]) == (7003, "--http")
    assert (settings.max_body, origins["max_body"]) == (1024 * 1024, str(file))
    assert (settings.grpc, origins["grpc"]) == (-1, "SERVAX_GRPC")
    assert (settings.host, origins["host"]) == ("127.0.0.1", "default")
    assert settings.max_delay == 0.005
    assert settings.cors_origin == ("http://a", "http://b")


def test_the_environment_can_name_the_file(file, monkeypatch):
    monkeypatch.setenv("SERVAX_CONFIG", str(file))
    assert resolve({}).settings.http == 7002


def test_lists_of_the_environment(monkeypatch):
    monkeypatch.setenv("SERVAX_CORS_ORIGIN", "http://a, http://b")
    monkeypatch.setenv("SERVAX_BUCKET", "batch=1,8 length=32")
    monkeypatch.setenv("SERVAX_TARGETS", "a.bundle b.bundle")
    settings = resolve({}).settings
    assert settings.cors_origin == ("http://a", "http://b")
    assert settings.bucket == ("batch=1,8", "length=32")
    assert settings.targets == ("a.bundle", "b.bundle")


@pytest.mark.parametrize(("text", "delay"), [("adaptive", None), ("0", 0.0), ("2ms", 0.002)])
def test_the_delay_of_batching(text, delay):
    assert make(max_delay=text).max_delay == delay


def test_everything_that_is_wrong_is_listed_with_where_it_was_said(file, monkeypatch):
    monkeypatch.setenv("SERVAX_MAX_QUEUE", "none")
    monkeypatch.setenv("SERVAX_API_KEY", "sesame")
    file.write_text('max-body = "large"\n')
    with pytest.raises(UsageError) as caught:
        resolve({"http": 99999, "swap": "sideways"}, file=file)
    text = str(caught.value)
    for part in ("--http", "65535", "SERVAX_MAX_QUEUE", f"max-body in {file}", "'large'", "--swap", "'keep-both'"):
        assert part in text
    assert "sesame" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("htpp = 1", "http"),
        ("http 1", "not TOML"),
        ('api-key = "0123456789abcdef"', "the environment"),
        ("[server]\nhttp = 1", "server"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, said):
    path = tmp_path / "servax.toml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        resolve({}, file=path)
    assert said in str(caught.value)
    assert "0123456789abcdef" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        resolve({}, file=tmp_path / "nope")


@pytest.mark.parametrize("name", ["body_timeout", "idle_timeout", "poll"])
@pytest.mark.parametrize("text", ["0", "0ms", "-1s"])
def test_a_time_that_leaves_none_is_refused(name, text):
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        resolve({name: text})


def test_a_drain_may_take_no_time_at_all():
    assert make(drain_timeout="0").drain_timeout == 0.0


@pytest.mark.parametrize(
    "origin",
    ["app.example.com", "https://app.example.com/", "https://a.example/page", "https://", "https://A.example", "a b",
     "https://a.example:443", "http://a.example:80", "null", "https://*.example.com", "https://user@a.example"],
)  # fmt: skip
def test_what_no_browser_sends_as_an_origin_is_refused(origin):
    with pytest.raises(UsageError, match="is no origin") as caught:
        resolve({"cors_origin": ["https://good.example", origin]})
    assert "--cors-origin" in str(caught.value)


@pytest.mark.parametrize(
    "origin",
    ["*", "https://app.example.com", "http://localhost:3000", "http://[::1]:8080", "https://a.example:80",
     "chrome-extension://abcdefghijklmnop"],
)  # fmt: skip
def test_what_is_an_origin(origin):
    assert make(cors_origin=[origin]).cors_origin == (origin,)


def test_models_to_begin_with_need_explicit_control():
    assert make(load=["a", "b"], control="explicit").load == ("a", "b")
    with pytest.raises(UsageError, match="control explicit"):
        make(load=["a"])


@pytest.mark.parametrize("given", [{"tls_cert": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}])
def test_parts_of_tls_belong_together(given):
    with pytest.raises(UsageError, match="tls"):
        make(**given)


def test_settings_of_a_program_s_own_do_not_look_around(monkeypatch):
    monkeypatch.setenv("SERVAX_HTTP", "7001")
    assert make().http == 8000


def test_rows_show_values_as_people_write_them_and_no_secret(monkeypatch):
    monkeypatch.setenv("SERVAX_API_KEY", "0123456789abcdef")
    rows = {name: (value, origin) for name, value, origin in resolve({"max_body": "1MiB"}).rows()}
    assert rows["max-body"] == ("1MiB", "--max-body")
    assert rows["drain-timeout"] == ("30s", "default")
    assert rows["max-delay"] == ("adaptive", "default")
    assert rows["access-log"] == ("true", "default")
    assert rows["api-key"] == ("********", "SERVAX_API_KEY")
    assert set(rows) == {name.replace("_", "-") for name in Settings.model_fields}


def test_every_setting_is_an_option_with_the_same_default():
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(serve.command).parameters.items()
        if name not in ("context", "config", "as_json")
    }
    secret = {"api_key", "admin_key"}
    assert set(options) == set(Settings.model_fields) - secret
    defaults = make(**{name: value for name, value in options.items() if value is not None})
    assert defaults == Settings()


def test_only_what_the_command_line_says_is_given():
    group = typer.main.get_command(_app())
    context = group.make_context("serve", ["a.bundle", "--http", "8000", "--no-access-log"])
    assert serve.given(context) == {"targets": ["a.bundle"], "http": 8000, "access_log": False}


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(serve.command)
    return app
