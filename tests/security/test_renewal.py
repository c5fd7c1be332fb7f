"""`ps-server dev-certs --every` goes on after a look that failed: certificates would end unnoticed otherwise."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.tools.cluster import until
from tests.tools.launching import END_SECONDS, Command


def test_a_look_that_fails_is_said_and_followed_by_others(tmp_path: Path) -> None:
    directory, said = tmp_path / "certs", tmp_path / "said"
    said.mkdir()
    command = Command(said, "-m", "ps_server", "dev-certs", str(directory), "--every", "0.05")
    reader = directory / "reader.pem"
    try:
        command.says("made (server.pem), worker.pem, reader.pem, admin.pem")
        command.process.send_signal(signal.SIGSTOP)  # or it looks in between, and makes the file
        reader.rename(directory / "moved.pem")
        reader.mkdir()
        command.process.send_signal(signal.SIGCONT)
        until(lambda: "Is a directory); looking again in 0.05 s" in command.err, "the word of a look that failed")
        reader.rmdir()
        command.says("made (reader.pem)")
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(END_SECONDS) == 0
    finally:
        command.clean_up()
    assert reader.is_file()
