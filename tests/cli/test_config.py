import json
import subprocess
import sys


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servax", "config", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment or None)


def test_every_setting_is_shown_with_its_origin(tmp_path, monkeypatch):
    file = tmp_path / "servax.toml"
    file.write_text('max-delay = "2ms"\n')
    monkeypatch.setenv("SERVAX_HTTP", "7001")
    shown = run("show", "--config", str(file))
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["http", "7001", "SERVAX_HTTP"] in rows
    assert ["max-delay", "2ms", str(file)] in rows
    assert ["grpc", "8001", "default"] in rows
    as_json = json.loads(run("show", "--json").stdout)
    assert as_json["http"] == {"value": "7001", "from": "SERVAX_HTTP"}


def test_what_cannot_be_used_exits_two(tmp_path):
    file = tmp_path / "servax.toml"
    file.write_text("htpp = 1\n")
    shown = run("show", "--config", str(file))
    assert shown.returncode == 2
    assert "htpp" in shown.stderr
