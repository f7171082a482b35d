"""Flags: one parser, values frozen with the first communicator, one table."""

import os
from collections.abc import Iterator

import pytest

import commlib
from commlib import flags
from commlib.errors import FlagError
from commlib.flags.registry import FLAGS
from tests.support.processes import run

NAME = "FLAGS_dynamic_static_unified_comm"


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(NAME, raising=False)
    yield
    commlib.shutdown()


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "True", "on", "On", "yes", " yes "])
def test_true(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NAME, text)
    assert flags.get(NAME) is True


@pytest.mark.parametrize("text", ["0", "false", "FALSE", "off", "no", "NO"])
def test_false(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NAME, text)
    assert flags.get(NAME) is False


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("name", sorted(FLAGS))
def test_an_empty_text_is_no_text(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    assert flags.get(name) == FLAGS[name].default
    row = next(row for row in flags.rows() if row["name"] == name)
    assert row["source"] == "default"


@pytest.mark.parametrize("text", ["2", "maybe", "truee", "1.0"])
def test_unknown_text(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(FlagError, match=f"{NAME}={text!r}.*export {NAME}=1"):
        flags.get(NAME)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "ten"])
def test_unknown_duration(text: str) -> None:
    with pytest.raises(FlagError, match="finite number of seconds"):
        flags.set("FLAGS_comm_timeout_s", text)
    assert flags.get("FLAGS_comm_timeout_s") == 600.0


@pytest.mark.parametrize("text", ["-1", "1.5", "", "much", "4096"])
def test_unknown_size(text: str) -> None:
    with pytest.raises(FlagError, match="MiB up to 2048"):
        flags.set("FLAGS_comm_channel_mib", text)
    assert flags.get("FLAGS_comm_channel_mib") == 128


@pytest.mark.parametrize("text", ["-1", "1.5", "", "all", "10001"])
def test_unknown_number_of_replays(text: str) -> None:
    with pytest.raises(FlagError, match="whole number up to 10000"):
        flags.set("FLAGS_graph_drift", text)
    assert flags.get("FLAGS_graph_drift") == 0


@pytest.mark.parametrize("text", ["1", "2.6", "4", "", "paddle"])
def test_unknown_release(text: str) -> None:
    with pytest.raises(FlagError, match="not a release of Paddle"):
        flags.set("FLAGS_comm_paddle_version", text)
    assert flags.get("FLAGS_comm_paddle_version") == 0


def test_unknown_text_is_an_error_at_import() -> None:
    code, _, err = run("-c", "import commlib", **{NAME: "perhaps"})
    assert code == 1
    assert "FlagError" in err
    assert "'perhaps'" in err


def test_unknown_name() -> None:
    for call in (lambda: flags.get("FLAGS_x"), lambda: flags.set("FLAGS_x", 1)):
        with pytest.raises(FlagError, match=f"no flag 'FLAGS_x'.*{NAME}"):
            call()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FLAGS_comm_timeout", "did you mean FLAGS_comm_timeout_s?"),
        ("FLAGS_dynamic_static_unified_com", f"did you mean {NAME}?"),
        ("FLAGS_custom_all_reduce", "did you mean FLAGS_custom_allreduce?"),
        ("flags_comm_timeout_s", "did you mean FLAGS_comm_timeout_s?"),
        ("FLAGS_comm_of_another_library", f"its flags: {NAME}"),
        ("FLAGS_cudnn_deterministic", ""),
        ("FLAGS_communicator_send_queue_size", ""),
    ],
)
def test_misspelt_names_are_reported(name: str, text: str) -> None:
    code, _, err = run("-c", "import commlib", **{name: "5"})
    assert code == 0
    line = f"{name} is set, but it is not a flag of commlib"
    assert (line in err and text in err) if text else err == ""
    code, out, _ = run("-m", "commlib", "doctor", **{name: "5"})
    assert (line in out and text in out) if text else name not in out
    assert (code == 0) is ("did you mean" not in text), out  # another library's flag is a note


def test_set_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "0")
    with flags.override(NAME, "on"):
        assert flags.get(NAME) is True
        with flags.override(NAME, False):
            assert flags.get(NAME) is False
        assert flags.get(NAME) is True
    assert flags.get(NAME) is False


def test_frozen_with_the_first_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    with flags.override(NAME, True):
        commlib.init("gloo")
        flags.set(NAME, "yes")  # the same value is not a change
        with pytest.raises(FlagError, match=r"frozen at True.*given False.*shutdown"):
            flags.set(NAME, False)
        commlib.shutdown()
    flags.set(NAME, False)
    assert commlib.init("gloo").engine == "c10d"
    monkeypatch.setenv("FLAGS_comm_timeout_s", "5")  # durations are not frozen
    assert flags.get("FLAGS_comm_timeout_s") == 5.0
    commlib.shutdown()
    flags._set_values.clear()


def test_changed_in_the_environment_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    commlib.init("gloo")
    monkeypatch.setenv(NAME, "1")
    with pytest.raises(FlagError, match=r"frozen at False.*given True"):
        commlib.new_ring(3, [0])
    assert not commlib.CommContextManager.instance().has(3)


def test_a_failed_start_freezes_nothing() -> None:
    assert os.environ.get("RANK") is None
    with pytest.raises(commlib.errors.RingError):
        commlib.new_ring(0, [0, 1])
    flags.set(NAME, True)
    flags.set(NAME, False)
    flags._set_values.clear()


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_comm_timeout_s", "7")
    with flags.override(NAME, 1):
        text = flags.table()
    rows = [line.split() for line in text.splitlines() if not line.startswith(" ")]
    lines = {name: rest for name, *rest in rows}
    assert lines["name"] == ["type", "default", "value", "source"]
    assert lines[NAME] == ["bool", "False", "True", "set"]
    assert lines["FLAGS_comm_timeout_s"] == ["seconds", "600.0", "7.0", "environment"]
    assert lines["FLAGS_comm_close_timeout_s"] == ["seconds", "10.0", "10.0", "default"]
    for flag in FLAGS.values():
        assert flag.description in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_one_log_line_names_the_engine() -> None:
    program = (
        "import logging, commlib\n"
        "logging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s')\n"
        "commlib.init('gloo'); commlib.new_ring(1, [0])\n"
    )
    code, out, err = run("-c", program, **{NAME: "on"})
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == f"commlib: engine gloo: {NAME}=1 (environment)"
    assert [line for line in lines[1:] if "engine gloo:" in line] == []
