"""The first session in the docs is what the commands print today, within 80 columns."""

import re

import pytest

from tools import transcript

TEXT = transcript.PAGE.read_text()
BLOCKS = re.findall(r"```console\n\$ ([^\n]*)\n(.*?)```\n", TEXT, re.DOTALL)


def likened(text):
    """Without what differs from run to run: figures, and the widths that follow from them."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "0", text)).strip()


def test_the_page_is_of_all_commands():
    assert [command for command, _ in BLOCKS] == list(transcript.COMMANDS)
    assert transcript.page(BLOCKS) == TEXT


@pytest.mark.parametrize(("command", "printed"), BLOCKS)
def test_what_is_printed_fits_80_columns(command, printed):
    # Mistakes are one line, however long, for scripts; terminals break it.
    lines = [line for line in printed.splitlines() if not line.startswith("eplb: error: ")]
    assert [line for line in lines if len(line) > transcript.COLUMNS] == []
    assert printed, command


@pytest.mark.slow
def test_the_commands_print_it_still(tmp_path):
    folder = transcript.copied_tutorial(tmp_path)
    for command, printed in BLOCKS:
        assert likened(transcript.output(command, folder)) == likened(printed), command
