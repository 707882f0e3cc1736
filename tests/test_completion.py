"""A shell completes what the parser knows."""

import shlex
import subprocess
from pathlib import Path

import pytest

from rbdc.cli import COMMANDS, main
from rbdc.commands.completion import SHELLS


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, options, the names that an option may have, and files."""
    (tmp_path / "rbdc.bash").write_text(printed("bash", capsys))
    (tmp_path / "speeds.csv").touch()

    def completed(line: str) -> set[str]:
        words = line.split(" ")
        script = (
            "source ./rbdc.bash\n"
            f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}\n"
            "$(complete -p rbdc | sed 's/.*-F \\([^ ]*\\).*/\\1/') rbdc\n"
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return {word.strip() for word in done.stdout.splitlines()}

    assert completed("rbdc ") >= set(COMMANDS)
    assert completed("rbdc tra") == {"train", "transfer"}
    assert completed("rbdc train --model-k") == {"--model-kwargs"}
    assert {"--budget", "--node", "--no-amp"} <= completed("rbdc train --")
    assert completed("rbdc train --engine ") == {"local", "ray"}
    assert completed("rbdc train --speeds sp") == {"speeds.csv"}


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_have_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(shell, capsys)
    assert all(command in script for command in COMMANDS) and "baseline-epochs" in script


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bahs"]) == 2
    assert "Did you mean bash?" in capsys.readouterr().err
